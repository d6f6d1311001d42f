"""Whole models whose slots change hands within steps say what all-hot ones say."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from headroom.errors import OptionError
from headroom.experts.cache import POLICIES, Policy
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.cuda.expert_cache import COUNTERS
from headroom.kernels.native.module import MODULE
from tests.split.cached_models import (
    DecodingModel,
    allow_small_caches,
    begin_with,
    set_link,
    share_misses,
    write_narrow,
)
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import TURING, stand_in_gpu

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(MODULE is None, reason="the C++ module was not built"),
]
SHARES = ("30%", "60%")
STEPS = {1: 3, 8: 2}  # by the sequences that run together
# Of logits, relative, where the CPU computes some experts (docs/experts.md).
LIMIT, GEMMA_LIMIT = 0.03, 0.1
# The layers of each family by default, as few as are possible with experts, and in the slow tests.
FAMILIES = {"qwen3moe": (1, 3), "laguna": (2, 5), "qwen35moe-wide": (1, 4), "gemma4-moe": (2, 6)}


@pytest.fixture(autouse=True)
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allow_small_caches(monkeypatch)
    with stand_in_gpu(monkeypatch, TURING):
        yield


def check(
    checkpoint: Checkpoint,
    cold: str,
    sequences: int,
    monkeypatch: pytest.MonkeyPatch,
    shares: Sequence[str] = SHARES,
    policies: Sequence[Policy] = POLICIES,
) -> None:
    """Assert that a model with caches says what it says if all experts are hot."""
    share_misses(monkeypatch, cold)
    wanted = DecodingModel(checkpoint, sequences).decode(STEPS[sequences]).logits
    limit = GEMMA_LIMIT if "gemma" in checkpoint.path.name else LIMIT
    totals: Counter[str] = Counter()
    for share in shares:
        made = DecodingModel(
            checkpoint, sequences, cold=cold, expert_budget=share, expert_policy="auto"
        )
        experts = made.model.cold_experts
        assert experts is not None
        if cold == "auto":
            set_link(experts)
        for policy in policies:
            begin_with(experts, policy)
            found = made.decode(STEPS[sequences])
            if cold == "gpu":
                assert torch.equal(found.logits, wanted)
            else:
                assert float((found.logits - wanted).norm() / wanted.norm()) < limit
            counts = experts.store.cache_counts.sum(0).tolist()
            totals += Counter(dict(zip(COUNTERS, counts, strict=True)))
            totals["given_up"] += found.given_up
        if made.model.decode_worker is not None:
            made.model.decode_worker.check()
            made.model.decode_worker.close()
    # The cache thrashes: experts get slots, and lose them right after a row has used them.
    assert totals["filled"] > 0
    assert totals["given_up"] > 0
    assert totals["bypassed"] > 0
    assert (totals["left_to_cpu"] > 0) == (cold == "auto")


@pytest.mark.parametrize("cold", ["gpu", "auto"])
@pytest.mark.parametrize("sequences", [1, 8])
def test_whatever_policy_fills_slots_the_logits_are_those_of_hot_experts(
    sequences: int, cold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_narrow("qwen3moe", tmp_path, 2 if sequences == 1 else 1)
    check(open_checkpoint(path), cold, sequences, monkeypatch)


@pytest.mark.parametrize(
    ("name", "cold", "sequences", "share", "policy"),
    [
        ("laguna", "gpu", 1, "30%", "lru"),
        ("qwen35moe-wide", "auto", 1, "30%", "spare"),
        ("gemma4-moe", "gpu", 1, "30%", "lru"),
    ],
)
def test_slots_change_hands_in_every_family(
    name: str,
    cold: str,
    sequences: int,
    share: str,
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_narrow(name, tmp_path, FAMILIES[name][0])
    check(open_checkpoint(path), cold, sequences, monkeypatch, [share], [policy, "static"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cold", ["gpu", "auto"])
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_policy_and_share_in_every_family(
    name: str, sequences: int, cold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_narrow(name, tmp_path, FAMILIES[name][1])
    check(open_checkpoint(path), cold, sequences, monkeypatch)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_policy_without_any_slots_is_refused(policy: Policy, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_narrow("qwen3moe", tmp_path, 1))
    with pytest.raises(OptionError, match="no layer has slots for the experts of 1 tokens"):
        DecodingModel(checkpoint, 1, expert_budget="0%", cold="gpu", expert_policy=policy)
