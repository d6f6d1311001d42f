"""Impossible sizes of heads and rotations are refused before anything is allocated by them."""

from pathlib import Path

import pytest

from headroom.errors import ModelError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.plan.describe import describe
from tests.plan.files import SMALL, write_gguf

DIM = SMALL["llama"].head_dim


def checkpoint_with(folder: Path, dims: int) -> Checkpoint:
    """Return a small model whose heads have so many rotated dimensions."""
    keys = {"rope.dimension_count": dims, "attention.layer_norm_rms_epsilon": 1e-5}
    return open_checkpoint(write_gguf(folder / "m.gguf", SMALL["llama"], "q8_0", keys))


@pytest.mark.parametrize("dims", [2, DIM - 2, DIM])
def test_an_even_number_of_dimensions_of_a_head_may_be_rotated(dims: int, tmp_path: Path) -> None:
    assert describe(checkpoint_with(tmp_path, dims)).shape.layers


@pytest.mark.parametrize("dims", [1, 3, DIM - 1, DIM + 1, DIM + 2])
def test_rotations_that_do_not_fit_a_head_are_refused(dims: int, tmp_path: Path) -> None:
    told = f"m.gguf: {dims} rotary dimensions do not fit heads of {DIM}"
    with pytest.raises(ModelError, match=told):
        describe(checkpoint_with(tmp_path, dims))
