"""What the launchers of CUDA kernels compute with torch alone."""

import torch

from headroom.kernels.cuda.delta_net import CHUNK, span_tables
from headroom.kernels.cuda.experts_prefill import sort_picks
from headroom.kernels.cuda.grouped import grouped_product
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
