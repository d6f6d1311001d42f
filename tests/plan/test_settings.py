"""PlanSettings: pages, rows and which weights are held how."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.plan.settings import PAGE_SIZE, pages_for
from tests.plan.shapes import settings, smollm2


@given(st.integers(0, 10**7))
def test_pages_hold_all_tokens_and_none_is_empty(tokens: int) -> None:
    pages = pages_for(tokens)
    assert pages * PAGE_SIZE >= tokens
    assert pages == 0 or (pages - 1) * PAGE_SIZE < tokens


def pages_in_use(window: int, chunk: int, context: int) -> int:
    """Return the most pages that a chunk and the window before its first row ever touch."""
    most = 0
    for start in range(context):
        end = min(start + chunk, context)
        first = max(0, start - window + 1)
        most = max(most, (end - 1) // PAGE_SIZE - first // PAGE_SIZE + 1)
    return most


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 900), st.integers(1, 3))
def test_a_ring_of_pages_holds_the_window_of_every_row_of_a_chunk(
    window: int, chunk: int, context: int, parallel: int
) -> None:
    asked = settings(context=context, chunk=chunk, parallel=parallel)
    found = asked.window_pages(window)
    assert found % parallel == 0
    assert found // parallel >= pages_in_use(window, chunk, context)
    assert found // parallel <= asked.sequence_pages


def test_the_largest_step_has_a_chunk_and_a_row_of_every_sequence() -> None:
    asked = settings(chunk=8, parallel=4)
    assert (asked.rows, asked.stream_rows) == (12, 12)
    captured = settings(chunk=8, parallel=4, kernels="cuda")
    assert (captured.rows, captured.stream_rows) == (12, DECODE_ROWS)
    assert settings(chunk=512, parallel=4, kernels="cuda").stream_rows == 516


@pytest.mark.parametrize(
    ("kernels", "dtype", "arena"),
    [
        ("cuda", "f16", True),
        ("cuda", "bf16", True),
        ("cuda", "f32", False),
        ("triton", "bf16", False),
        ("native", "int8", False),
        ("reference", "f32", False),
    ],
)
def test_only_fused_kernels_of_16_bits_have_an_arena_and_tiles(
    kernels: str, dtype: str, arena: bool
) -> None:
    asked = settings(kernels=kernels, compute_type=dtype, unpack_bytes=1000)
    assert asked.uses_arena == arena
    assert asked.expert_unpack_bytes == (1000 if arena else 0)
    model = smollm2()
    held = model.in_panels() if kernels == "native" else model.in_tiles() if arena else model
    assert asked.held(model) == held


@pytest.mark.parametrize(
    ("cold", "copies", "held"),
    [("auto", False, True), ("gpu", False, True), ("drop", False, False), ("drop", True, True)],
)
def test_dropped_experts_are_not_held_without_copies(cold: str, copies: bool, held: bool) -> None:
    assert settings(cold=cold, keep_host_copy=copies).holds_cold == held
