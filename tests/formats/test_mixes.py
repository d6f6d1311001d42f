"""Mixes: the types of tensors by name, shape and layer."""

import pytest

from headroom.errors import OptionError
from headroom.formats.mixes import MIXES, find_mix, gets_better, kept_in_f32, tensor_type
from headroom.formats.quants import BF16, F16, F32, MXFP4, Q4_0, Q4_K, Q5_0, Q6_K, Q8_0, QuantType


@pytest.mark.parametrize(
    ("name", "shape", "better", "expected"),
    [
        ("attn_q.weight", (2048, 2048), False, Q4_K),
        ("ffn_down.weight", (2048, 8192), True, Q6_K),
        ("ffn_down.weight", (2816, 2112), False, Q5_0),  # 2112 is not whole blocks of 256
        ("ffn_down.weight", (2816, 2112), True, Q8_0),
        ("proj.weight", (64, 48), False, F16),  # 48 is not whole blocks of 32
        ("attn_norm.weight", (2048,), False, F32),
        ("ffn_gate_inp.weight", (256, 2048), False, F32),
        ("token_embd.weight", (1000, 2048), False, Q4_K),
        ("output.weight", (1000, 2048), False, Q6_K),
    ],
)
def test_a_tensor_of_a_q4_k_m_file_has_its_type(
    name: str, shape: tuple[int, ...], better: bool, expected: object
) -> None:
    assert tensor_type(find_mix("q4_k_m"), name, shape, False, better) is expected


def test_half_of_the_layers_get_the_better_type() -> None:
    chosen = [index for index in range(40) if gets_better(index, 40)]
    assert chosen == [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39]


@pytest.mark.parametrize("mix", MIXES)
def test_a_tied_table_has_the_type_of_the_head_and_an_untied_one_the_base(mix: str) -> None:
    found, table = find_mix(mix), ("token_embd.weight", (1000, 2048))
    assert tensor_type(found, *table, True, True) is found.head
    assert tensor_type(found, *table, False, True) is found.base


@pytest.mark.parametrize("mix", MIXES)
def test_every_type_fits_its_rows(mix: str) -> None:
    for columns in (2048, 2112, 48, 7):
        for name in ("ffn_down.weight", "ffn_down_exps.weight", "output.weight"):
            found = tensor_type(find_mix(mix), name, (64, columns), False, True)
            assert columns % found.block == 0


@pytest.mark.parametrize(
    ("mix", "name", "expected"),
    [
        ("mxfp4", "ffn_up_exps.weight", MXFP4),
        ("mxfp4", "ffn_up.weight", Q8_0),
        ("q4_0", "ffn_up_exps.weight", Q4_0),
        ("q4_0", "per_layer_model_proj.weight", BF16),
        ("f16", "per_layer_model_proj.weight", F16),
    ],
)
def test_experts_and_per_layer_projections_have_rules_of_their_own(
    mix: str, name: str, expected: QuantType
) -> None:
    assert tensor_type(find_mix(mix), name, (4, 256, 256), False, False) is expected


def test_vectors_norms_routers_and_convolutions_stay_in_f32() -> None:
    for name in (
        "attn_norm.weight",
        "ffn_gate_inp.weight",
        "ssm_conv1d.weight",
        "rope_freqs.weight",
    ):
        assert kept_in_f32(f"blk.0.{name}", (4, 64))
    assert kept_in_f32("attn_q.bias", (64,))
    assert not kept_in_f32("attn_q.weight", (64, 64))


def test_a_mix_is_found_in_any_case_and_others_are_refused_with_the_list() -> None:
    assert find_mix("Q4-K-M") is MIXES["q4_k_m"]
    with pytest.raises(OptionError, match=r"'q7' is no quantisation\. Choose f32, f16,"):
        find_mix("q7")
