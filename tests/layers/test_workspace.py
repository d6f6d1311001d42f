"""The memory of a step: nothing is written beyond it."""

from pathlib import Path

import pytest
import torch

from headroom.errors import CapacityError
from headroom.families.files import open_checkpoint
from headroom.formats.quants import F32
from headroom.kernels.native import matmul
from headroom.kernels.native.module import MODULE
from headroom.kernels.weight import Weight
from headroom.layers.workspace import Workspace
from tests.running import run_steps
from tests.tiny import llama_config, random_model, save_gguf


def workspace(rows: int, sequences: int) -> Workspace:
    return Workspace(*(torch.empty(rows, 4) for _ in range(3)), torch.empty(sequences, 9),
                     torch.empty(0))  # fmt: skip


def test_a_step_of_more_rows_than_planned_is_refused() -> None:
    workspace(3, 1).check(3)
    with pytest.raises(CapacityError, match=r"has 4 rows and memory was planned for 3\..*smaller"):
        workspace(3, 1).check(4)


def test_more_logits_than_planned_are_refused() -> None:
    assert workspace(3, 2).logits_for(2).shape == (2, 9)
    with pytest.raises(CapacityError, match=r"3 rows of logits.*planned for 2\..*smaller runs"):
        workspace(3, 2).logits_for(3)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_model_refuses_a_step_that_its_plan_has_no_memory_for(
    tmp_path: Path, kernels: str
) -> None:
    checkpoint = open_checkpoint(save_gguf(random_model(llama_config()), tmp_path / "m.gguf"))
    with pytest.raises(CapacityError, match="A step has 60 rows"):
        run_steps(checkpoint, [list(range(60))], [[60]], kernels=kernels, chunk=16)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
def test_no_kernel_writes_beyond_the_memory_that_it_is_given() -> None:
    weight = matmul.prepare(Weight(torch.randn(5, 8), F32, 5, 8))
    with pytest.raises(ValueError, match=r"\(3, 5\) does not fit into memory of \(2, 5\)"):
        matmul.matmul_f32(torch.randn(3, 8), weight, "f32", torch.empty(2, 5))
    with pytest.raises(ValueError, match=r"\(3, 8\) does not fit into memory of \(2, 8\)"):
        matmul.embed(torch.tensor([0, 1, 2]), weight, torch.empty(2, 8))
