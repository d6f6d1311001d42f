"""The scratch that is lent to the C++ kernels: exactly what the C++ module says that it takes."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.formats.quants import F32
from headroom.kernels.native import layer, scratch
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.native.scratch import (
    LayerSizes,
    experts_scratch,
    layer_scratch,
    matmul_scratch,
)

SOURCES = Path(scratch.__file__).parent
needs_module = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
COLUMNS = st.integers(1, 300).map(lambda cells: 32 * cells)


@needs_module
@given(st.integers(1, 5000), COLUMNS)
def test_a_product_is_lent_what_it_takes(rows: int, columns: int) -> None:
    assert matmul_scratch(rows, columns) == MODULE.matmul_scratch(rows, columns)


@needs_module
@given(
    rows=st.integers(1, 3000),
    used=st.integers(1, 16),
    experts=st.integers(16, 512),
    width=st.integers(1, 200).map(lambda blocks: 8 * blocks),
    hidden=COLUMNS,
    tiles=st.booleans(),
)
def test_experts_are_lent_what_they_take(
    rows: int, used: int, experts: int, width: int, hidden: int, tiles: bool
) -> None:
    found = experts_scratch(rows, used, hidden, width, experts, tiles=tiles)
    assert found == MODULE.experts_scratch(rows, used, hidden, width, experts, tiles=tiles)


@needs_module
@given(
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 8),
    dim=st.integers(1, 64).map(lambda step: 8 * step),
    hidden=COLUMNS,
    ffn_width=COLUMNS,
    prompt=st.integers(0, 600),
    contexts=st.lists(st.integers(1, 5000), max_size=6),
)
def test_a_layer_is_lent_what_it_takes(
    group: int,
    kv_heads: int,
    dim: int,
    hidden: int,
    ffn_width: int,
    prompt: int,
    contexts: list[int],
) -> None:
    """A step of one row for each sequence that decodes, and of a chunk of a prompt."""
    heads = group * kv_heads
    shapes = [(heads * dim, hidden), *2 * [(kv_heads * dim, hidden)], (hidden, heads * dim),
              *2 * [(ffn_width, hidden)], (hidden, ffn_width)]  # fmt: skip
    matrices = [MODULE.Matrix(0, F32.ggml_id, *shape) for shape in shapes]
    cache = MODULE.KvCache(0, F32.ggml_id, 4 * dim, 0, F32.ggml_id, 4 * dim, kv_heads, 64)
    fused = MODULE.Layer(matrices, 0, 0, 1e-5, (heads, kv_heads, dim, 0), 1.0, cache, 0)
    spans = [(row, 1, length - 1, 0, -1) for row, length in enumerate(contexts)]
    if prompt > 1:
        spans.append((len(contexts), prompt, 17, 0, -1))
    table = torch.tensor(spans or [(0, 0, 0, 0, -1)], dtype=torch.int64)
    rows = len(contexts) + prompt
    taken = fused.scratch_bytes(POOL.ops, (rows, dim // 2), table.data_ptr(), len(spans))
    sizes = LayerSizes(hidden, heads * dim, kv_heads * dim, kv_heads * dim, ffn_width, heads, dim)
    assert layer_scratch(sizes, rows, contexts) == taken


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("kernels.h", "KEY_BLOCK", scratch.PARTIAL_KEYS),
        ("panels.h", "CELL", scratch.CELL),
        ("attention.cpp", "MAX_QUERIES", layer.MAX_GROUP),
        ("attention.cpp", "MAX_DIM", layer.MAX_DIM),
    ],
)
def test_constants_are_those_of_the_cpp_sources(file: str, name: str, value: int) -> None:
    found = re.findall(rf"^constexpr \w+ {name} = (\d+);", (SOURCES / file).read_text(), re.M)
    assert found == [str(value)]
