"""Models with caches of every type, and layers of every backend of the CPU, against references."""

from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.native.module import MODULE
from headroom.layers.block import PreNormBlock
from headroom.layers.native_block import NativeBlock
from headroom.options import KV_TYPES
from headroom.split import build
from tests.running import run_steps
from tests.synth_models import write_model

PROMPT = torch.randint(300, 1000, (40,), generator=torch.Generator().manual_seed(5)).tolist()
PIECES = [30, 1, 9]
# Most by which rounding a cache to each type may move a logit, on average. Logits spread by 3.
ROUNDING = {
    "f32": 0.0, "f16": 0.001, "bf16": 0.005, "q8_0": 0.02,
    "q5_1": 0.1, "q5_0": 0.13, "q4_1": 0.2, "q4_0": 0.25,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("llama")
    return open_checkpoint(write_model("llama", "q8_0", folder, few_layers=True))


def logits(checkpoint: Checkpoint, **settings: object) -> torch.Tensor:
    """The logits of all rows of a prompt that is read in pieces."""
    return run_steps(checkpoint, [PROMPT], [PIECES], threads=1, **settings)[0]


@pytest.mark.parametrize("name", KV_TYPES)
def test_a_cache_of_any_type_gives_the_references_logits_and_rounds_as_little_as_its_type_does(
    name: str, checkpoint: Checkpoint
) -> None:
    wanted = logits(checkpoint, k_type=name, v_type=name, kernels="reference")
    found = logits(checkpoint, k_type=name, v_type=name)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)
    moved = (wanted - logits(checkpoint, kernels="reference")).abs().mean().item()
    assert moved <= ROUNDING[name]
    assert (moved > 0) == (name != "f32")


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_layers_in_one_cpp_call_compute_what_single_operations_do(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[type] = []
    for kind in (NativeBlock, PreNormBlock):
        monkeypatch.setattr(kind, "__call__", noted(kind, ran))
    whole = logits(checkpoint)
    assert set(ran) == {NativeBlock}
    ran.clear()
    monkeypatch.setattr(build, "refuses_native_block", lambda *layer: "for this test")
    single = logits(checkpoint)
    assert set(ran) == {PreNormBlock}
    torch.testing.assert_close(whole, single, atol=1e-4, rtol=0)


def noted(kind: type, ran: list[type]) -> object:
    """Return the call of a type of blocks, which adds the type to `ran`."""
    call = kind.__call__

    def run(self: object, *given: object) -> object:
        ran.append(kind)
        return call(self, *given)

    return run
