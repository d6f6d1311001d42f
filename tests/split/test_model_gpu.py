"""Every family with its tensors on the stand-in GPU, against the plain kernels of the CPU."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from tests.families.oracles import PROMPT, VARIANTS, variant
from tests.running import run_steps
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import run_on_gpu

TEXT = PROMPT + PROMPT[::-1]
PROMPTS = [TEXT[:41], TEXT[3:44]]
PIECES = [34, 1, 6]  # the first is longer than what goes as few rows
# One variant of each kind of layer; the others differ in their files alone.
GENERIC = (
    *("llama", "qwen3-untied", "qwen3moe", "qwen35", "qwen35moe", "laguna"),
    *("laguna-per-element", "gemma4-31b", "gemma4-26b", "gemma4-e2b"),
)


def _wanted(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], pieces: list[int]
) -> list[torch.Tensor]:
    return run_steps(checkpoint, prompts, [pieces] * len(prompts), kernels="reference")


def _assert_near(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GENERIC)
def test_separate_operations_stay_on_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "MIXED"))
    wanted = _wanted(checkpoint, PROMPTS, PIECES)
    with stand_in_gpu(monkeypatch):
        found = run_on_gpu(checkpoint, PROMPTS, PIECES, kernels="reference")
    _assert_near(found, wanted)


def test_the_variants_are_known() -> None:
    assert set(GENERIC) <= set(VARIANTS)
