"""WeightMemory: its pieces do not overlap, are aligned, and keep their chunk alive."""

import gc
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.kernels.native.memory import CHUNK_BYTES, VECTOR_ALIGNMENT, WeightMemory


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 63, 64, 1000, 1 << 20, CHUNK_BYTES]), max_size=8))
def test_pieces_are_aligned_and_never_overlap(sizes: list[int]) -> None:
    memory = WeightMemory()
    pieces = [memory.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.data_ptr() % VECTOR_ALIGNMENT == 0 for piece in pieces)
    ranges = sorted((p.data_ptr(), p.data_ptr() + len(p)) for p in pieces if len(p))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_a_chunk_lives_as_long_as_its_pieces() -> None:
    memory = WeightMemory()
    piece = memory.take(100).fill_(7)
    memory.take(CHUNK_BYTES)  # starts another chunk
    del memory
    gc.collect()
    assert torch.equal(piece, torch.full((100,), 7, dtype=torch.uint8))
