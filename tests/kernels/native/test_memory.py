"""WeightMemory: its pieces do not overlap, are aligned, and keep their chunk alive; pages."""

import gc
import itertools
import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.kernels.native import memory
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


def resident_bytes() -> int:
    """The memory of this process that the system has given."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is resident")
@pytest.mark.parametrize("libc", [True, False])
def test_touched_pages_are_resident_and_hold_zeros(
    libc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not libc:
        monkeypatch.setattr(memory, "_libc", lambda: None)
    size = 2 * memory.TOUCH_BYTES + 12345
    pages, before = memory.large_pages(size), resident_bytes()
    memory.touch_pages(pages)
    assert resident_bytes() - before > 0.9 * size
    assert not pages.any()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is resident")
def test_dropped_pages_are_the_systems_and_hold_zeros_when_they_are_used_again() -> None:
    size = 64 << 20
    pages = memory.large_pages(size)
    pages.fill_(7)
    before = resident_bytes()
    assert memory.drop_pages(pages[100:])
    assert before - resident_bytes() > 0.9 * size
    assert pages[:100].eq(7).all()
    assert not pages[8192:].any()
    assert not memory.drop_pages(pages[:0])
