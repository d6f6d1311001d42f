"""The parts of CUDA's attention that run without a GPU."""

import pytest
import torch

from headroom.formats.quants import F32
from headroom.kernels.cuda.attention import DecodeShape
from headroom.kernels.cuda.prefill import attend
from headroom.kernels.cuda.sizes import count_pieces
from headroom.kernels.ops import PagedKv, Span
from headroom.kernels.reference.attention import attention

# Not bf16: torch's own products of it on the CPU need instructions that not every CPU has.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 37), (41, 1), (90, 600)])
def test_a_gathered_span_attends_as_the_plain_kernel_does(
    dtype: torch.dtype, window: int, start: int, rows: int
) -> None:
    torch.manual_seed(rows)
    count = start + rows
    queries = torch.randn(rows, 4, 16).to(dtype) * 0.25
    keys, values = torch.randn(2, count, 2, 16).to(dtype)
    cache = PagedKv(keys.float(), values.float(), F32, F32, page_size=1)
    span = Span(0, rows, start, torch.arange(count))
    expected = attention(queries.float(), cache, (span,), 1.0, window)
    first = max(0, start - window + 1) if window else 0  # what `prefill` gathers
    found = attend(queries, keys[first:], values[first:], window)
    assert (found - expected).abs().max() < TOLERANCE[dtype]


def test_contexts_are_cut_into_pieces_that_grow() -> None:
    counts = {1: 1, 128: 1, 129: 2, 4096: 32, 4097: 33, 16384: 80, 16385: 81, 16384 + 513: 82}
    counts |= {32768: 112, 32769: 113, 65536: 144, 131072: 176, 262144: 208}
    assert {context: count_pieces(context) for context in counts} == counts


def test_scratch_holds_sums_and_two_numbers_of_each_piece() -> None:
    shape = DecodeShape(3, 2, 2, heads=8, kv_heads=2, dim=64, max_context=300)
    assert shape.scratch_floats == 3 * 8 * 3 * (64 + 2)
