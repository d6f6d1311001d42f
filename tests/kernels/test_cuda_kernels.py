"""CUDA kernels on the CPU against the plain ones: the checks of tests/gpu with small sizes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.kernels.cuda import (
    delta_net,
    experts,
    half_experts,
    matmul,
    narrow,
    pack,
    picks,
    route,
)
from headroom.kernels.cuda.pack import PACKED, record_bytes
from headroom.kernels.ops import RouterRule
from tests.gpu import check_delta_net, check_experts, check_matmul, check_route
from tests.gpu.check_delta_net import Shape, span
from tests.kernels.cuda_on_cpu import COMPILER, compile_on_cpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let the launchers run their kernels here, as if on a GPU of the properties returned."""
    torch.manual_seed(0)
    for module in (delta_net, experts, half_experts, matmul, narrow, pack, route):
        monkeypatch.setattr(module, "compile_kernel", compile_on_cpu)
    for check in (check_delta_net, check_experts, check_matmul, check_route):
        monkeypatch.setattr(check, "DEVICE", "cpu")
    gpu = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return gpu


@pytest.mark.parametrize("columns", [16, 64, 128])
def test_delta_net_row_after_row_agrees_with_the_reference(columns: int) -> None:
    spans = (span(0, 1, 7, 4), span(1, 3, 2, 1), span(4, 2, 0, 0))
    assert check_delta_net.check(Shape(4, 2, columns == 64), spans, 8, columns)


@pytest.mark.parametrize("processors", [132, 1])  # narrow blocks and wide ones
def test_delta_net_in_chunks_agrees_with_the_reference(
    on_the_cpu: SimpleNamespace, processors: int
) -> None:
    on_the_cpu.multi_processor_count = processors
    spans = (span(0, 65, 0, 3), span(65, 17, 100, 0), span(90, 2, 0, 5))
    assert check_delta_net.check(Shape(2, 1, tiled=True), spans, 96, how="prefill")


def test_delta_net_in_chunks_runs_where_blocks_have_little_shared_memory(
    on_the_cpu: SimpleNamespace,
) -> None:
    on_the_cpu.shared_memory_per_block_optin = 64 << 10
    spans = (span(0, 65, 0, 3), span(65, 17, 100, 0))
    assert check_delta_net.check(Shape(2, 1, tiled=True), spans, 82, how="prefill")


@pytest.mark.parametrize(
    ("rule", "biased", "ties"),
    [
        (RouterRule(8, "softmax", True, 1.0), False, True),
        (RouterRule(3, "sigmoid", True, 2.5, softcap=20.0), True, False),
    ],
    ids=["softmax", "sigmoid"],
)
def test_routes_agree_with_the_reference(rule: RouterRule, biased: bool, ties: bool) -> None:
    assert check_route.check(60, 7, rule, biased, ties)


def test_logits_that_are_no_numbers_change_nobody_elses_counts() -> None:
    counts = torch.zeros(3, 40, dtype=torch.int64)
    for number in (float("nan"), float("inf"), -float("inf")):
        logits = torch.full((2, 41), number)
        ids, _ = route.route(logits, RouterRule(4, "softmax", True, 1.0), None, counts[1], None)
        assert ((ids >= 0) & (ids < 40)).all()
    assert counts.sum(1).tolist() == [0, 3 * 2 * 4, 0]


def test_scores_do_not_depend_on_other_rows() -> None:
    assert check_route.check_scores(9, 72)


@pytest.mark.parametrize(
    ("kinds", "sizes", "activation"),
    [
        (("q4_k", "q4_k", "q6_k"), (5, 256, 256), "silu"),
        (("mxfp4", "q8_0", "q4_1"), (4, 96, 288), "gelu"),
    ],
    ids=str,
)
def test_experts_agree_with_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    kinds: tuple[str, str, str],
    sizes: tuple[int, int, int],
    activation: str,
) -> None:
    def in_float32(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return picks.grouped_product(x.float(), weights.float(), ends).bfloat16()

    def product(x: torch.Tensor, matrix: torch.Tensor, out: Any, out_dtype: Any = None) -> Any:
        return out.copy_(torch.matmul(x.float(), matrix.float()))

    # What stands in for a GPU here may lack bf16 products, and those of f16 with wider sums.
    monkeypatch.setattr(experts, "grouped_product", in_float32)
    monkeypatch.setattr(torch, "mm", product)
    assert check_experts.check(kinds, sizes, 3, 2, activation)


@pytest.mark.parametrize("name", check_matmul.KINDS)
def test_packed_products_agree_with_float64(name: str) -> None:
    assert check_matmul.check(name, 40, 512, 9)


def test_packed_products_fill_outputs_that_lie_one_after_another() -> None:
    assert check_matmul.check_outputs("q5_k")


def test_blocks_take_tiles_in_turns_where_the_gpu_is_small(on_the_cpu: SimpleNamespace) -> None:
    on_the_cpu.multi_processor_count = 1
    on_the_cpu.shared_memory_per_multiprocessor = 1
    assert check_matmul.check("q4_k", 16 * 19, 256, 17)


@pytest.mark.parametrize(("name", "rows"), [("q8_0", 40), ("q4_k", 16 * 201)])
def test_packed_products_run_where_blocks_have_little_shared_memory(
    on_the_cpu: SimpleNamespace, name: str, rows: int
) -> None:
    on_the_cpu.shared_memory_per_block_optin = 64 << 10
    assert check_matmul.check(name, rows, 1280 if rows == 40 else 256, 25)


@pytest.mark.parametrize("limit", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
def test_products_fit_into_the_shared_memory_of_a_block(limit: int) -> None:
    for record in map(record_bytes, PACKED):
        for tiles, records in ((10, 1), (10, 5), (199, 20), (200, 20), (600, 68)):
            shapes = [
                matmul.shape_for(tiles, records, groups, record, limit) for groups in (1, 2, 3, 4)
            ]
            for groups, shape in enumerate(shapes, start=1):
                barriers = 8 * shape.warps * shape.stages
                assert shape.shared_bytes(record, groups) + barriers <= limit
            assert len({shape.split for shape in shapes}) == 1  # sums follow from it


def test_a_rows_product_does_not_depend_on_other_rows() -> None:
    assert check_matmul.check_alone("q4_k", 48, 1280)


@pytest.mark.parametrize(("tokens", "columns"), [(9, 384), (3, 96)])
def test_rows_in_halves_hold_what_they_stand_for(tokens: int, columns: int) -> None:
    assert check_matmul.check_rows(tokens, columns)
