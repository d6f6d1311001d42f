"""Every CUDA kernel against the plain ones: the cases of the check scripts, one test each."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.ops import RouterRule
from tests.gpu import (
    check_attention,
    check_delta_net,
    check_experts,
    check_grouped,
    check_load,
    check_matmul,
    check_norms,
    check_route,
    check_sampler,
    expert_cases,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MIXED = ("q4_k", "q4_k", "q6_k")
MATMULS = [
    (kind, *size)
    for kind in check_matmul.KINDS
    for size in check_matmul.SIZES
    if size[1] % BY_NAME[kind].block == 0
]
MATMULS += [(kind, 33, 768, 40, "f16") for kind in check_matmul.KINDS]
EXPERTS = [*expert_cases.FEW, *expert_cases.LARGE]
RULES = [  # a rule, whether scores are biased, whether they tie
    (RouterRule(8, "softmax", True, 1.0), False, True),
    (RouterRule(4, "softmax", False, 2.5), False, True),
    (RouterRule(8, "sigmoid", True, 2.5, softcap=20.0), True, False),
    (RouterRule(1, "sigmoid", False, 1.0), False, True),
]
ATTENTION = dict(check_attention.checks())


def assert_passes(check: Callable[..., object], *case: object) -> None:
    """Run a check; what it prints of its comparisons must have no failure."""
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        check(*case)
        torch.cuda.synchronize()
    lines = printed.getvalue()
    assert "PASS" in lines
    assert "FAIL" not in lines, lines


@pytest.mark.parametrize("case", MATMULS, ids=str)
def test_products_agree_with_the_reference(case: tuple[object, ...]) -> None:
    assert_passes(check_matmul.check, *case)


@pytest.mark.parametrize("kind", check_matmul.KINDS)
def test_products_fill_outputs_that_lie_one_after_another_and_add(kind: str) -> None:
    assert_passes(check_matmul.check_outputs, kind)


@pytest.mark.parametrize("kind", check_matmul.KINDS)
def test_a_rows_product_does_not_depend_on_other_rows(kind: str) -> None:
    assert_passes(check_matmul.check_alone, kind, 144, 2048)


@pytest.mark.parametrize("case", check_matmul.REAL[:5], ids=str)
def test_products_one_after_another_have_the_same_bits_every_time(
    case: tuple[str, int, int],
) -> None:
    assert_passes(check_matmul.check_again, *case)


@pytest.mark.parametrize("case", check_matmul.ROWS, ids=str)
def test_rows_in_halves_hold_what_they_stand_for(case: tuple[int, int]) -> None:
    assert_passes(check_matmul.check_rows, *case)


@pytest.mark.parametrize("case", check_load.packings(), ids=str)
def test_packed_matrices_have_the_bytes_of_each_by_itself(case: tuple[object, ...]) -> None:
    assert_passes(check_load.check, *case)


@pytest.mark.parametrize("staging", check_load.STAGINGS)
def test_weights_arrive_through_buffers_smaller_than_they_are(tmp_path: Path, staging: int) -> None:
    assert_passes(check_load.check_upload, tmp_path, staging)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_agree_with_the_reference(case: tuple[object, ...]) -> None:
    assert_passes(check_experts.check, *case)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_experts_of_many_rows_agree_by_our_own_product_too(case: tuple[object, ...]) -> None:
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("the product is of later GPUs")
    assert_passes(check_experts.check, *case, "own")


@pytest.mark.parametrize("case", [*EXPERTS, *expert_cases.SORTED, *expert_cases.REAL], ids=str)
def test_experts_of_rows_sorted_by_expert_agree_with_the_reference(
    case: tuple[object, ...],
) -> None:
    assert_passes(check_experts.check, *case, "sorted")


@pytest.mark.parametrize("case", expert_cases.SORTED_ALONE, ids=str)
def test_a_sorted_rows_sum_of_experts_does_not_depend_on_other_rows(
    case: tuple[object, ...],
) -> None:
    assert_passes(check_experts.check_sorted_alone, *case)


@pytest.mark.parametrize("kind", ["q4_k", "f16", "bf16"])
def test_a_rows_sum_of_experts_does_not_depend_on_other_rows(kind: str) -> None:
    assert_passes(check_experts.check_alone, (kind, kind, kind), (6, 256, 512), 3)


@pytest.mark.parametrize("case", expert_cases.SHARED, ids=str)
def test_an_expert_that_every_row_visits_runs_beside_the_others(case: tuple[object, ...]) -> None:
    assert_passes(check_experts.check_shared, *case)


@pytest.mark.parametrize("case", expert_cases.ONCE, ids=str)
def test_rows_that_share_an_expert_have_the_bits_of_rows_that_read_it_each(
    case: tuple[object, ...],
) -> None:
    assert_passes(check_experts.check_once, *case)


@pytest.mark.parametrize("experts", [5, 128, 256, 1000])
def test_experts_picked_by_the_fused_kernel_are_those_of_the_router(experts: int) -> None:
    for scores in ("softmax", "sigmoid"):
        rule = RouterRule(4, scores, True, 1.5)
        assert_passes(check_experts.check_chosen, (experts, 32, 256), rule, scores == "sigmoid")


@pytest.mark.parametrize("case", [(257, 2048), (9, 5120), (128, 2816), (5, 8192), (3, 72)])
def test_rows_are_normed_scored_and_rounded_at_once(case: tuple[int, int]) -> None:
    assert_passes(check_route.check_scored_rows, *case)


@pytest.mark.parametrize("dtype", check_grouped.LIMITS)
@pytest.mark.parametrize("case", expert_cases.GROUPED, ids=str)
def test_grouped_products_are_near_and_have_the_same_bits_in_all_tiles(
    case: tuple[object, ...], dtype: str
) -> None:
    if dtype == "bf16" and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("the product is of later GPUs")
    assert_passes(check_grouped.check, *case, dtype)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_agrees_with_the_reference(name: str) -> None:
    assert_passes(ATTENTION[name])


@pytest.mark.parametrize("case", check_delta_net.cases(), ids=str)
def test_delta_net_agrees_with_the_reference(case: tuple[object, ...]) -> None:
    assert_passes(check_delta_net.check, *case)


@pytest.mark.parametrize("shape", check_delta_net.SHAPES, ids=str)
def test_delta_net_has_the_same_bits_however_it_is_divided(shape: check_delta_net.Shape) -> None:
    assert_passes(check_delta_net.check_blocks, shape, *check_delta_net.PREFILLS[-1])
    spans = (check_delta_net.span(0, 16, 5, 0), check_delta_net.span(17, 1, 0, 2))
    assert_passes(check_delta_net.check_columns, shape, spans, 20)


@pytest.mark.parametrize("rows", [3, 37])
@pytest.mark.parametrize("experts", [8, 60, 128, 256, 512, 1000])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_routes_agree_with_the_reference(
    rule: tuple[RouterRule, bool, bool], experts: int, rows: int
) -> None:
    assert_passes(check_route.check, experts, rows, *rule)


def test_routes_to_many_experts_and_with_a_bias_of_one_agree() -> None:
    assert_passes(check_route.check, 64, 5, RouterRule(32, "softmax", True, 1.0), False, False)
    assert_passes(check_route.check, 60, 3, RouterRule(1, "sigmoid", False, 1.0), True, False)


@pytest.mark.parametrize("case", [(8, 64), (257, 2048), (129, 5120), (61, 2052)], ids=str)
def test_scores_do_not_depend_on_other_rows(case: tuple[int, int]) -> None:
    assert_passes(check_route.check_scores, *case)


@pytest.mark.parametrize("case", check_sampler.SIZES, ids=str)
def test_tokens_are_those_that_the_engine_draws(case: tuple[object, ...]) -> None:
    assert_passes(check_sampler.check, *case)


@pytest.mark.parametrize("case", [(1, 64), (3, 2048), (17, 5120), (2, 100)], ids=str)
def test_norms_agree_with_the_reference(case: tuple[int, int]) -> None:
    assert_passes(check_norms.check_norm, *case)
    assert_passes(check_norms.check_added_norm, *case)


def test_norms_of_heads_agree_with_the_reference() -> None:
    assert_passes(check_norms.check_heads)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activations_agree_with_the_reference(activation: str) -> None:
    assert_passes(check_norms.check_gated, activation)


@pytest.mark.parametrize("kind", check_norms.TYPES)
@pytest.mark.parametrize(("columns", "pinned"), [(256, False), (2304, False), (5120, True)])
def test_rows_of_tables_have_the_same_bits(kind: str, columns: int, pinned: bool) -> None:
    assert_passes(check_norms.check_embed, kind, columns, pinned)
