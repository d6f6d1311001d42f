"""Padding: the planner counts the bytes of panels as the C++ kernels allocate them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.formats.quants import BF16, F32, Q4_K, Q8_0, QuantType
from headroom.kernels.native.module import MODULE
from headroom.kernels.types import PRODUCT_TYPES
from headroom.plan.padding import expert_panel_padding, panel_bytes, panel_padding
from headroom.plan.shape import Padding


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@given(
    quant=st.sampled_from(sorted(PRODUCT_TYPES, key=str)),
    rows=st.integers(1, 5000),
    blocks=st.integers(1, 300),
)
def test_bytes_of_panels_are_those_of_the_cpp_kernels(
    quant: QuantType, rows: int, blocks: int
) -> None:
    columns = blocks * quant.block
    assert panel_bytes(quant, rows, columns) == MODULE.panel_bytes(quant.ggml_id, rows, columns)


def test_rows_are_filled_up_where_tensors_are_multiplied_by() -> None:
    assert panel_padding({"attn_q.weight": ((32, 256), Q4_K)}) == Padding()
    assert panel_padding({"attn_gate.weight": ((72, 256), Q4_K)}) == Padding(8 * 144, 8 * 256)
    assert panel_padding({"ssm_beta.weight": ((6, 64), BF16)}) == Padding(10 * 128, 10 * 64)
    # Routers are f32 whatever their file has.
    router = panel_padding({"ffn_gate_inp.weight": ((6, 64), BF16)})
    assert router == Padding(10 * 256, 10 * 64, 10 * 64)
    for vector in ("attn_norm.weight", "ffn_gate_inp.scale"):
        assert panel_padding({vector: ((50,), F32)}) == Padding()
    assert panel_padding({"ssm_conv1d.weight": ((50, 4), F32)}) == Padding()


def test_padding_of_several_tensors_is_added_up_whatever_comes_between() -> None:
    tensors = {
        "attn_norm.weight": ((50,), F32),
        "attn_gate.weight": ((72, 256), Q4_K),
        "ssm_conv1d.weight": ((50, 4), F32),
        "ffn_gate_inp.weight": ((6, 64), BF16),
        "ssm_beta.weight": ((6, 64), BF16),
    }
    size = 8 * 144 + 10 * 256 + 10 * 128
    assert panel_padding(tensors) == Padding(size, 8 * 256 + 2 * 10 * 64, 10 * 64)


def test_gate_and_up_of_experts_are_filled_up_apart() -> None:
    apart = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), ((4, 24, 64), Q8_0))
    fused = {"ffn_gate_up_exps.weight": ((4, 48, 64), Q8_0)}
    assert expert_panel_padding(apart) == expert_panel_padding(fused) == 2 * 8 * 68
    # Panels begin at multiples of 64 bytes.
    assert expert_panel_padding({"ffn_down_exps.weight": ((4, 16, 1), F32)}) == 0
    assert expert_panel_padding({"ffn_down_exps.weight": ((4, 16, 1), BF16)}) == 32
