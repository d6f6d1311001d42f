"""What the launchers of CUDA kernels compute with torch alone."""

import pytest
import torch

from headroom.kernels.cuda.chunks import CHUNK, run_plain_chunks, span_tables
from headroom.kernels.cuda.picks import grouped_product, sort_picks
from headroom.kernels.ops import Span

CPU = torch.device("cpu")
NO_PAGES = torch.zeros(0, dtype=torch.int64)


def test_rows_of_no_span_are_padding_and_chunks_begin_with_their_span() -> None:
    spans = (Span(0, CHUNK + 1, 0, NO_PAGES, 3), Span(CHUNK + 1, 2, 10, NO_PAGES, 1))
    tables = span_tables(spans, CHUNK + 5, CPU)
    assert tables.sequence.tolist() == [0] * (CHUNK + 1) + [1, 1, -1, -1]
    assert tables.index.tolist() == [*range(CHUNK + 1), 10, 11, 0, 0]
    assert tables.starts.tolist() == [0, 10]
    assert tables.state_slots.tolist() == [3, 1]
    assert tables.first_rows.tolist() == [0, CHUNK, CHUNK + 1]
    assert tables.counts.tolist() == [CHUNK, 1, 2]
    assert tables.chunk_ends.tolist() == [2, 3]


@pytest.mark.parametrize("rows", [1, CHUNK, CHUNK + 7])
def test_chunks_give_what_the_recurrence_gives(rows: int) -> None:
    torch.manual_seed(rows)
    heads, dim = 2, 16
    queries, keys, values = torch.randn(3, rows, heads, dim, dtype=torch.float64)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    decay, strength = -torch.rand(rows, heads) * 3, torch.rand(rows, heads)
    gates = torch.stack((decay, strength), -1).double()
    memory = torch.randn(heads, dim, dim, dtype=torch.float64)
    state, wanted = memory.clone(), torch.empty_like(values)
    for row in range(rows):
        state *= gates[row, :, 0].exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, keys[row])
        change = gates[row, :, 1:] * (values[row] - known)
        state += keys[row][:, :, None] * change[:, None, :]
        wanted[row] = torch.einsum("hkv,hk->hv", state, queries[row])
    found = run_plain_chunks((queries, keys, values), gates, memory)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(memory, state)


def test_equal_keys_do_not_overflow_within_a_chunk() -> None:
    rows = torch.ones(CHUNK, 1, 4) / 2  # of length one: the worst case for a triangular inverse
    gates = torch.stack((torch.full((CHUNK, 1), -80.0), torch.ones(CHUNK, 1)), -1)
    memory = torch.zeros(1, 4, 4)
    found = run_plain_chunks((rows, rows, rows), gates, memory)
    torch.testing.assert_close(found, rows)


def test_picks_come_sorted_by_expert_and_each_knows_its_place() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    picks = sort_picks(ids, 5)
    assert picks.ends.tolist() == [2, 2, 4, 5, 5]
    assert picks.rows.tolist() == [0, 2, 0, 1, 2, 1]  # in their order within an expert
    assert picks.places.tolist() == [[2, 0], [5, 3], [1, 4]]


def test_each_row_meets_its_own_experts_matrix() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    x, weights = torch.randn(3, 8), torch.randn(5, 16, 8)
    picks = sort_picks(ids, 5)
    found = grouped_product(x[picks.rows], weights, picks.ends, 5)[picks.places]
    for row, rank in ((0, 0), (0, 1), (1, 1), (2, 0), (2, 1)):
        wanted = weights[ids[row, rank]] @ x[row]
        torch.testing.assert_close(found[row, rank], wanted)
