"""The parts of CUDA's attention that run without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from headroom.formats.quants import F32
from headroom.kernels.cuda import attention as cuda_attention
from headroom.kernels.cuda.attention import DecodeBlock, DecodeShape, attend, decode_block
from headroom.kernels.cuda.attention_scratch import count_pieces
from headroom.kernels.ops import PagedKv, Span
from headroom.kernels.reference.attention import attention
from tests.gpu.attention_cases import Heads, make_tables, random_cache, wanted
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

SM_75, SM_86, SM_90 = 64 << 10, 99 << 10, 227 << 10  # bytes of shared memory of a block

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


@pytest.mark.parametrize("shared", [SM_75, SM_86, SM_90])
def test_blocks_of_decoding_fit_into_shared_memory(shared: int) -> None:
    for dim in range(16, 513, 16):
        blocks = [decode_block(dim, groups, shared) for groups in (1, 2, 3, 9)]
        assert all(block.shared_bytes(dim) <= shared for block in blocks)
        assert len({block.parts for block in blocks}) == 1  # sums follow from it


def test_blocks_of_decoding_are_small_only_where_they_must_be() -> None:
    for shared in (SM_86, SM_90):
        assert decode_block(256, 9, shared) == DecodeBlock(4, 4)
        assert decode_block(512, 9, shared) == DecodeBlock(2, 2)
    assert decode_block(128, 9, SM_75) == DecodeBlock(4, 4)
    assert decode_block(256, 9, SM_75) == DecodeBlock(2, 2)
    assert decode_block(512, 1, SM_75) == DecodeBlock(1, 1)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("heads", "spans", "tree"),
    [
        (Heads(4, 2, 64, "f16", "bf16"), [(70, 1), (5, 3)], False),
        (Heads(4, 1, 256, "bf16", "f16"), [(130, 1), (9, 1)], False),
        (Heads(2, 1, 512, "q8_0", "q8_0"), [(20, 5)], True),
        (Heads(4, 2, 64, "f16", "f16"), [(290, 1), (2, 2), (160, 5)], False),
    ],
    ids=str,
)
def test_a_few_rows_attend_on_sm_75(
    gpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    heads: Heads,
    spans: list[tuple[int, int]],
    tree: bool,
) -> None:
    torch.manual_seed(0)
    gpu.shared_memory_per_block_optin = SM_75
    gpu.multi_processor_count = 1  # so that blocks take one piece after another
    use_kernels(monkeypatch, compile_on_cpu)
    cache = random_cache(heads, 1024)
    tables = make_tables(spans, 1, 1024, tree)
    shape = DecodeShape(
        rows=tables.rows,
        sequences=tables.rows,  # as captured steps have room for
        span_rows=max(rows for _, rows in spans),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        dim=heads.dim,
        max_context=320,
    )
    queries = torch.randn(tables.rows, heads.heads, heads.dim) * heads.dim**-0.5 * 2
    scratch = torch.full((shape.scratch_floats,), float("nan"))
    found = cuda_attention.decode(queries, cache, tables, shape, scratch).double()[:-1]
    expected = wanted(queries, cache, tables, shape)[:-1]
    limit = 3e-3 if heads.k_type == "q8_0" else 3e-5  # packed values are rounded to f16
    assert (found - expected).abs().max() / expected.abs().max() < limit
