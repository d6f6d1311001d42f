"""The arena lends the memory of a step by frames."""

import pytest
import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.buffers import Buffer


def test_layers_that_are_alike_are_lent_the_same_tensors() -> None:
    arena = scratch.Arena(torch.empty(1 << 12, dtype=torch.uint8))

    def layer(rows: int) -> list[torch.Tensor]:
        with arena.frame():
            first = arena.take(Buffer((rows, 3), "f32"))
            with arena.frame():
                inner = arena.take(Buffer((rows,), "bf16"))
            return [first, inner, arena.take(Buffer((rows,), "i64"))]

    first, inner, last = layer(4)
    assert all(a is b for a, b in zip(layer(4), (first, inner, last), strict=True))
    assert inner.data_ptr() == last.data_ptr() == first.data_ptr() + 256
    assert [x.shape[0] for x in layer(5)] == [5, 5, 5]
    assert arena.peak_bytes == 512
    assert arena.frames == 0


def test_an_arena_remembers_a_limited_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MOST_LENT", 2)
    arena = scratch.Arena(torch.empty(1 << 12, dtype=torch.uint8))
    for rows in (1, 2, 3, 1, 3):
        with arena.frame():
            assert arena.take(Buffer((rows, 2), "f32")).shape == (rows, 2)
            assert len(arena._lent) <= 2
