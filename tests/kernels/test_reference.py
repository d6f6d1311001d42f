"""The reference kernels against definitions in float64, and that their rows are independent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.errors import KernelError
from headroom.formats.quants import BY_NAME, Q8_0
from headroom.kernels.ops import Case, Span
from headroom.kernels.reference.attention import attention, write_kv
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.reference.matmul import embed, matmul, unpack_rows
from headroom.kernels.reference.norms import gated_activation, rms_norm, rope
from headroom.kernels.reference.quantise import quantise
from headroom.kernels.registry import pick
from tests.kernels.cases import (
    WEIGHT_TYPES,
    Sized,
    all_cases,
    empty_cache,
    plain_weight,
    random_weight,
)


@pytest.mark.parametrize("quant", WEIGHT_TYPES, ids=str)
def test_matmul_equals_the_product_with_dequantised_weights(quant) -> None:
    torch.manual_seed(0)
    weight = random_weight(quant, 70, 512)
    x = torch.randn(19, 512)
    expected = x.double() @ unpack_rows(weight, slice(None)).double().t()
    largest = float(expected.abs().max())  # a sum's rounding error depends on its terms
    result = matmul(x, weight, "f32").double()
    torch.testing.assert_close(result, expected, atol=1e-6 * largest, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.data())
def test_a_row_of_matmul_does_not_depend_on_the_others(rows: int, data: st.DataObject) -> None:
    torch.manual_seed(rows)
    weight = plain_weight(torch.randn(192, 576))
    x = torch.randn(rows, 576)
    row = data.draw(st.integers(0, rows - 1))
    together = matmul(x, weight, "f32")[row]
    assert torch.equal(together, matmul(x[row : row + 1], weight, "f32")[0])


def test_matmul_computes_in_the_type_that_is_asked_for() -> None:
    weight, x = plain_weight(torch.randn(8, 64)), torch.randn(4, 64)
    result = matmul(x, weight, "bf16")
    expected = x.bfloat16().double() @ weight.data.bfloat16().double().t()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, atol=0.1, rtol=0.02)
    assert not torch.equal(result, matmul(x, weight, "f32"))


def test_embed_gathers_rows_of_a_packed_table() -> None:
    table = random_weight(Q8_0, 50, 64)
    ids = torch.tensor([3, 49, 3, 0])
    assert torch.equal(embed(ids, table, torch.empty(4, 64)), dequantise(table.data, Q8_0, 64)[ids])


def test_rms_norm_equals_its_definition() -> None:
    x, weight = torch.randn(5, 32).double(), torch.randn(32).double()
    expected = torch.nn.functional.rms_norm(x, (32,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_rope_turns_pairs_by_their_angle_and_leaves_the_rest() -> None:
    x, angle = torch.randn(3, 2, 12), torch.randn(3, 4)
    turned = rope(x, angle.cos(), angle.sin())
    pairs = (
        torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag, x[..., 8:]), dim=-1))


def test_gated_activation_equals_its_definition() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(
        gated_activation(gate, up, "silu"), gate / (1 + torch.exp(-gate)) * up
    )


@pytest.mark.parametrize("window", [0, 3, 300])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 40), (250, 13), (700, 1), (256, 256)])
def test_attention_equals_plain_softmax_attention(start: int, rows: int, window: int) -> None:
    torch.manual_seed(start + rows)
    heads, kv_heads, dim = 6, 2, 24
    length = start + rows
    cache = empty_cache("f32", "f32", 1024, kv_heads, dim)
    pages = torch.randperm(64)
    keys, values = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)
    position = torch.arange(length)
    write_kv(cache, pages[position // 16] * 16 + position % 16, keys, values)
    queries = torch.randn(rows, heads, dim)
    spans = (Span(0, rows, start, pages),)
    result = attention(queries, cache, spans, 0.3, window)

    distance = torch.arange(start, length)[:, None] - position
    seen = (distance >= 0) & (distance < (window or length + 1))
    group = heads // kv_heads
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1).double(),
        keys.repeat_interleave(group, 1).transpose(0, 1).double(),
        values.repeat_interleave(group, 1).transpose(0, 1).double(),
        attn_mask=seen,
        scale=0.3,
    ).transpose(0, 1)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "f16")])
def test_a_row_of_attention_does_not_depend_on_how_its_prompt_was_cut(types) -> None:
    torch.manual_seed(1)
    cache = empty_cache(*types, 1024, 2, 32)
    write_kv(cache, torch.arange(1024), torch.randn(1024, 2, 32), torch.randn(1024, 2, 32))
    pages, queries = torch.randperm(64), torch.randn(600, 6, 32)
    whole = attention(queries, cache, (Span(0, 600, 0, pages),), 0.2, 0)
    for first, rows in ((0, 1), (299, 1), (512, 1), (100, 77), (255, 2), (590, 10)):
        part = attention(
            queries[first : first + rows], cache, (Span(0, rows, first, pages),), 0.2, 0
        )
        assert torch.equal(part, whole[first : first + rows])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
def test_q8_0_cache_values_come_back_within_half_a_step(values: list[float]) -> None:
    x = torch.tensor(values)
    back = dequantise(quantise(x, Q8_0), Q8_0, 32)
    step = float(x.abs().max()) / 127
    assert float((back - x).abs().max()) <= 0.5 * step + 127 * step * 2**-11 + 1e-5


def test_a_block_of_huge_values_stays_finite() -> None:
    back = dequantise(quantise(torch.full((32,), 1e30), Q8_0), Q8_0, 32)
    assert torch.isfinite(back).all()


def test_a_type_that_no_cache_has_is_refused_with_the_choices() -> None:
    with pytest.raises(
        KernelError, match=r"q4_k is not a cache type\. Choose from f32, f16, bf16, q8_0, q5_1"
    ):
        quantise(torch.zeros(32), BY_NAME["q4_k"])


def test_a_case_that_no_kernel_takes_says_why() -> None:
    with pytest.raises(KernelError, match="reference: i32 is not a weight type"):
        pick("matmul", Case(quant=BY_NAME["i32"]))


def test_cases_have_distinct_names() -> None:
    names = [str(sized) for sized in all_cases()]
    assert len(set(names)) == len(names)
    assert all(isinstance(sized, Sized) for sized in all_cases())
