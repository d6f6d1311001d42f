"""Routing statistics: every choice of every path is counted once."""

from pathlib import Path

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.experts.stats import RoutingStats
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.ops import Case, RouterRule
from headroom.kernels.registry import pick
from headroom.split.pipeline import Pipeline
from tests.families.oracles import PROMPT, variant
from tests.running import PAGE_SIZE, open_pipeline, running


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small mixture of experts."""
    return open_checkpoint(variant("qwen3moe").save_gguf(tmp_path_factory.mktemp("m") / "m.gguf"))


def hand_count(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    """What transformers' own routers choose for a text, `[layers, experts]`."""
    model = variant("qwen3moe").model()
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([tokens]), output_router_logits=True)
    experts = model.config.num_experts
    picks = [x.topk(model.config.num_experts_per_tok).indices for x in out.router_logits]
    return torch.stack([torch.bincount(x.flatten(), minlength=experts) for x in picks])


def step(pipeline: Pipeline, *turns: Turn) -> None:
    with torch.inference_mode():
        pipeline.forward(make_batch(list(turns), PAGE_SIZE))
    for turn in turns:
        turn.sequence.cached += turn.rows


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_counts_of_prefill_and_decode_equal_a_hand_count(
    checkpoint: Checkpoint, kernels: str
) -> None:
    pipeline = open_pipeline(checkpoint, kernels=kernels)
    stats = pipeline.routing
    assert stats is not None
    assert not stats.counts().any()
    first, second = running(PROMPT, [0, 1]), running(PROMPT[::-1], [2, 3], state_slot=1)
    step(pipeline, Turn(first, 10))
    step(pipeline, Turn(first, 1), Turn(second, 5))  # a decode step together with a prompt
    for _ in range(2):
        step(pipeline, Turn(first, 1), Turn(second, 1))
    expected = hand_count(checkpoint, PROMPT[:13]) + hand_count(checkpoint, PROMPT[::-1][:7])
    assert torch.equal(stats.counts(), expected)
    assert stats.counts().sum(1).tolist() == [(13 + 7) * 3] * len(expected)


def test_rows_that_check_guesses_are_counted_like_any_others(checkpoint: Checkpoint) -> None:
    pipeline = open_pipeline(checkpoint)
    assert pipeline.routing is not None
    sequence = running(PROMPT, [0, 1])
    for rows in (8, 1, 4, 1):  # a prompt, a token, four guessed ones, a token
        step(pipeline, Turn(sequence, rows))
    assert torch.equal(pipeline.routing.counts(), hand_count(checkpoint, PROMPT[:14]))


def test_a_model_without_experts_has_no_statistics(tiny_path: Path) -> None:
    assert open_pipeline(open_checkpoint(tiny_path)).routing is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reference", [False, True])
def test_logits_that_are_nan_or_infinite_change_no_counts_of_other_layers(
    number: float, reference: bool
) -> None:
    stats = RoutingStats(layers=3, experts=5, device="cpu")
    route = pick("route", Case(device="cpu", dtype="f32", reference=reference)).run
    logits = torch.full((2, 5), number)
    ids, _ = route(logits, RouterRule(3, "softmax", True, 1.0), None, stats.of_layer(1).decode)
    assert ((ids >= 0) & (ids < 5)).all()
    assert stats.counts().sum(1).tolist() == [0, 6, 0]


def test_counts_are_a_copy_that_later_steps_leave_alone() -> None:
    stats = RoutingStats(layers=2, experts=3, device="cpu")
    before = stats.counts()
    stats.of_layer(1).decode[2] += 4
    assert before.sum() == 0
    assert stats.counts().tolist() == [[0, 0, 0], [0, 0, 4]]


def test_choices_of_steps_of_few_rows_are_told_apart_in_a_copy() -> None:
    stats = RoutingStats(layers=2, experts=3, device="cpu")
    stats.of_layer(0).decode[1] += 2
    stats.of_layer(0).prefill[1] += 5
    counts, few_rows = stats.counts_with_decode()
    stats.of_layer(0).decode[1] += 1
    assert counts.tolist() == [[0, 7, 0], [0, 0, 0]]
    assert few_rows.tolist() == [[0, 2, 0], [0, 0, 0]]
