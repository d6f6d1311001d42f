"""Attention and the KV cache on every CPU backend: trees, windows, stored bits, extreme values."""

from dataclasses import replace

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.formats.quants import BY_NAME
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import Case, Kernel, PagedKv, Span
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.reference.quantise import CACHE_TYPES, quantise
from headroom.kernels.registry import KERNELS
from headroom.kernels.weight import PLAIN_TYPES
from tests.kernels.cases import empty_cache, random_tree

PACKED = [name for name in CACHE_TYPES if name not in PLAIN_TYPES]


def kernels(op: str) -> list[Kernel]:
    return [k for k in KERNELS if k.op == op and k.refuses(Case()) is None]


def filled_cache(types: tuple[str, str], kv_heads: int, dim: int) -> PagedKv:
    cache = empty_cache(*types, 1024, kv_heads, dim)
    keys, values = torch.randn(2, 1024, kv_heads, dim)
    cache.keys.copy_(quantise(keys, cache.k_type))
    cache.values.copy_(quantise(values, cache.v_type))
    return cache


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(-6, 4), st.booleans())
def test_packed_blocks_are_the_bits_of_the_reference_quantiser(
    name: str, seed: int, magnitude: float, coarse: bool
) -> None:
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    if coarse:  # values on a grid, where many fall on halves of a step
        x = (x * 4 / 10**magnitude).round() / 4
        x[0] = 0
    kind = gguf.GGMLQuantizationType[name.upper()]
    expected = torch.from_numpy(gguf.quants.quantize(x.numpy(), kind))
    assert torch.equal(quantise(x, BY_NAME[name]), expected)
    for kernel in kernels("kv_write"):
        cache = empty_cache(name, name, 16, 1, 96)
        kernel.run(cache, torch.arange(8), x[:, None], x[:, None])
        assert torch.equal(cache.keys[:8, 0], expected), str(kernel)


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_every_kernel_stores_extreme_values_with_the_same_bits_and_finite(
    name: str, isa: str
) -> None:
    limit = 1e30 if name in PACKED else 65504.0
    rows = [[0.0], [limit], [-limit, limit], [1e-30], [1e-40, 0.0], [-0.0, 1.0], [65504.0, 6e-8]]
    x = torch.stack([torch.tensor(row).repeat(32)[:32] for row in rows])[:, None]
    stored = []
    for kernel in kernels("kv_write"):
        cache = empty_cache(name, name, 16, 1, 32)
        kernel.run(cache, torch.arange(len(rows)), x, x)
        stored.append(cache)
        back = cache.keys.float()
        if name in PACKED:
            back = dequantise(cache.keys, cache.k_type, 32)
        assert back.isfinite().all(), str(kernel)
    assert all(torch.equal(stored[0].keys, cache.keys) for cache in stored)
    assert all(torch.equal(stored[0].values, cache.values) for cache in stored)


@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize("kernel", kernels("attention"), ids=str)
def test_a_tree_that_is_a_chain_changes_no_bit(kernel: Kernel, window: int, isa: str) -> None:
    cache, queries = filled_cache(("f16", "q8_0"), 2, 32), torch.randn(14, 6, 32)
    pages, chain = torch.randperm(64), torch.ones(13, 13).tril().bool()
    for start in (0, 250, 505):
        plain = (Span(0, 13, start, pages[:40]), Span(13, 1, 70, pages[40:]))
        tree = (Span(0, 13, start, pages[:40], tree=chain), plain[1])
        expected = kernel.run(queries, cache, plain, 0.2, window)
        assert torch.equal(kernel.run(queries, cache, tree, 0.2, window), expected)


@pytest.mark.parametrize("window", [0, 3, 280])
@pytest.mark.parametrize("kernel", kernels("attention"), ids=str)
def test_a_path_of_a_tree_equals_its_tokens_as_a_sequence(
    kernel: Kernel, window: int, isa: str
) -> None:
    torch.manual_seed(2)
    cache, pages, start, rows = filled_cache(("f32", "f32"), 1, 48), torch.arange(64), 250, 17
    tree, queries = random_tree(rows), torch.randn(rows, 3, 48)
    result = kernel.run(queries, cache, (Span(0, rows, start, pages, tree=tree),), 0.3, window)
    for row in range(rows):
        path = tree[row].nonzero().flatten()
        alone = empty_cache("f32", "f32", 1024, 1, 48)
        alone.keys[:start], alone.values[:start] = cache.keys[:start], cache.values[:start]
        alone.keys[start : start + len(path)] = cache.keys[start + path]
        alone.values[start : start + len(path)] = cache.values[start + path]
        spans = (Span(0, len(path), start, pages),)
        expected = kernel.run(queries[path], alone, spans, 0.3, window)[-1]
        torch.testing.assert_close(result[row], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [5, 17])
@pytest.mark.parametrize("kernel", kernels("attention"), ids=str)
def test_all_rows_of_a_block_see_all_of_it(kernel: Kernel, rows: int, isa: str) -> None:
    torch.manual_seed(4)
    cache, pages, start = filled_cache(("f32", "f32"), 2, 32), torch.randperm(64), 250
    queries = torch.randn(rows, 6, 32)
    block = Span(0, rows, start, pages, tree=torch.ones(rows, rows, dtype=torch.bool))
    place = torch.arange(start + rows)
    slots = pages[place // 16] * 16 + place % 16
    keys, values = cache.keys[slots].double(), cache.values[slots].double()
    for window, first in ((0, 0), (40, start + rows - 40)):  # all rows count as the last one
        result = kernel.run(queries, cache, (block,), 0.2, window)
        scores = torch.einsum("qgd,kd->qgk", queries[:, :3].double() * 0.2, keys[first:, 0])
        expected = torch.einsum("qgk,kd->qgd", scores.softmax(-1), values[first:, 0])
        torch.testing.assert_close(result[:, :3].double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kernel", kernels("attention"), ids=str)
def test_keys_outside_the_window_are_never_read(kernel: Kernel, tree: bool, isa: str) -> None:
    cache, queries = filled_cache(("f32", "f16"), 2, 32), torch.randn(12, 6, 32)
    mask = random_tree(11) if tree else None
    pages = torch.randperm(64)
    spans = (Span(0, 11, 300, pages[:30], tree=mask), Span(11, 1, 400, pages[30:]))
    expected = kernel.run(queries, cache, spans, 0.2, 20)
    seen = torch.zeros(1024, dtype=torch.bool)
    for span in spans:
        position = torch.arange(span.start - 19, span.start + span.rows)
        seen[span.pages[position // 16] * 16 + position % 16] = True
    cache.keys[~seen], cache.values[~seen] = float("nan"), float("nan")
    stale = torch.zeros_like(pages)  # a page that another sequence holds by now
    again = tuple(
        replace(span, pages=torch.cat((stale[:first], span.pages[first:])))
        for first, span in zip((17, 23), spans, strict=True)
    )
    assert torch.equal(kernel.run(queries, cache, again, 0.2, 20), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("kernel", kernels("attention"), ids=str)
def test_scores_of_any_size_give_finite_weights(kernel: Kernel, isa: str) -> None:
    cache = empty_cache("f16", "f16", 64, 1, 16)
    cache.keys[:], cache.values[:] = 65504, 65504
    cache.keys[3], cache.values[3] = -65504, -65504
    spans = (Span(0, 1, 40, torch.arange(4)),)
    for size in (1e30, 1e-30, 1e-40, 0.0, -1e30):
        result = kernel.run(torch.full((1, 2, 16), size), cache, spans, 1.0, 0)
        expected = -65504.0 if size < 0 else 65504.0 if size > 1 else 65504 * 39 / 41
        torch.testing.assert_close(result, torch.full((1, 2, 16), expected), rtol=1e-4, atol=0)


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize("types", [("f32", "f32"), ("q4_0", "f16")])
def test_a_row_of_native_attention_depends_on_neither_threads_nor_other_rows(
    types: tuple[str, str], isa: str
) -> None:
    kernel = next(k for k in kernels("attention") if k.backend == "native")
    cache, pages, queries = filled_cache(types, 2, 64), torch.randperm(64), torch.randn(600, 6, 64)
    POOL.set(3, isa=isa)
    whole = kernel.run(queries, cache, (Span(0, 600, 0, pages),), 0.2, 0)
    POOL.set(1, isa=isa)
    for first, rows in ((0, 1), (299, 1), (512, 1), (100, 77), (255, 2), (590, 10)):
        spans = (Span(0, rows, first, pages),)
        part = kernel.run(queries[first : first + rows], cache, spans, 0.2, 0)
        assert torch.equal(part, whole[first : first + rows])


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "bf16"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_few_rows_have_the_same_bits_as_in_a_prompt(
    isa: str, types: tuple[str, str], rows: int
) -> None:
    """Threads divide the keys of few rows, but the rows of a prompt."""
    attention = next(k.run for k in KERNELS if str(k) == "attention-native")
    cache, pages = filled_cache(types, 2, 64), torch.randperm(64)
    queries = torch.randn(24, 6, 64)
    for window in (0, 300):
        prompt = attention(queries, cache, (Span(0, 24, 700, pages),), 0.125, window)
        few = attention(queries[:rows], cache, (Span(0, rows, 700, pages),), 0.125, window)
        assert torch.equal(few, prompt[:rows])
        alone = attention(queries[:1], cache, (Span(0, 1, 700, pages),), 0.125, window)
        assert torch.equal(alone, prompt[:1])
