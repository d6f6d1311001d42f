"""Pages of layers with a window: used in turn, and never while anyone still sees what they hold."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.families.config import AttentionConfig, RopeConfig
from headroom.layers.batch import Batch, Span
from headroom.layers.cache import allocate_kv
from headroom.plan.settings import PAGE_SIZE, PlanSettings


def plan(context: int, parallel: int, chunk: int) -> PlanSettings:
    return PlanSettings(
        context=context, parallel=parallel, chunk=chunk, cache_tokens=PAGE_SIZE, k_type="f16",
        v_type="f16", compute_type="f32", weights="packed", threads=1,
    )  # fmt: skip


def attention(window: int) -> AttentionConfig:
    return AttentionConfig(
        heads=1, kv_heads=1, head_dim=2, rope=RopeConfig(1e4, 2), scale=1.0, window=window
    )


def step_of(turns: list[tuple[int, int, int]]) -> Batch:
    """Return a step of turns (slot, start, rows); its tokens and lent pages are not used."""
    spans, first = [], 0
    for slot, start, rows in turns:
        spans.append(Span(first, rows, start, torch.zeros(0, dtype=torch.int64), slot))
        first += rows
    nothing = torch.zeros(first, dtype=torch.int64)
    return Batch(nothing, nothing, nothing, tuple(spans), nothing)


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 200),
    chunk=st.integers(1, 200),
    context=st.integers(64, 900),
    data=st.data(),
)
def test_every_row_finds_all_that_it_sees(
    window: int, chunk: int, context: int, data: st.DataObject
) -> None:
    pages = allocate_kv(attention(window), plan(context, 2, chunk), "cpu")
    held: dict[int, tuple[int, int]] = {}  # what was last written to each slot
    cached = [0, 0]
    for _ in range(20):
        turns = []
        for slot in data.draw(st.permutations([0, 1])):
            rows = data.draw(st.sampled_from([1, chunk, data.draw(st.integers(1, chunk))]))
            if rows := min(rows, context - cached[slot]):
                turns.append((slot, cached[slot], rows))
        if not turns:
            break
        batch = step_of(turns)
        view = pages.view(batch)
        written = iter(view.kv_slots.tolist())
        for slot, start, rows in turns:  # all is written before anything is read
            held |= {next(written): (slot, position) for position in range(start, start + rows)}
        assert max(held) < len(pages.kv.keys)
        for span, ours in zip(batch.spans, view.spans, strict=True):
            for position in range(max(0, span.start - window + 1), span.start + span.rows):
                at = int(ours.pages[position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
                assert held[at] == (span.state_slot, position)
            cached[span.state_slot] += span.rows


def test_pages_of_a_window_do_not_grow_with_the_context() -> None:
    sizes = {allocate_kv(attention(100), plan(n, 3, 64), "cpu").nbytes for n in (512, 4096, 65536)}
    assert sizes == {3 * 4 * PAGE_SIZE * 2 * 2 * 2}  # sequences, pages, keys and values of two f16


def test_a_context_smaller_than_the_ring_has_pages_for_itself_alone() -> None:
    assert allocate_kv(attention(1000), plan(128, 2, 64), "cpu").ring == 2


def test_layers_that_see_all_use_the_pages_that_are_lent() -> None:
    batch = step_of([(1, 70, 3)])
    view = allocate_kv(attention(0), plan(512, 2, 64), "cpu").view(batch)
    assert (view.spans, view.kv_slots) == (batch.spans, batch.kv_slots)


def test_layers_with_rings_of_one_size_share_their_view() -> None:
    batch = step_of([(0, 500, 2), (1, 3, 1)])
    first, second = (allocate_kv(attention(w), plan(4096, 2, 64), "cpu") for w in (70, 80))
    assert first.view(batch) is second.view(batch)
    other = allocate_kv(attention(700), plan(4096, 2, 64), "cpu")
    assert first.view(batch) is not other.view(batch)
