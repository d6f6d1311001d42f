"""CUDA kernels on the CPU against the plain ones: the checks of tests/gpu with small sizes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.kernels.cuda import delta_net, matmul, route
from headroom.kernels.cuda.delta_net import ChunkBlocks
from headroom.kernels.cuda.matmul_shapes import Gpu, Product, ProductShape, shape_for
from headroom.kernels.cuda.sizes import TILED, record_bytes
from headroom.kernels.ops import RouterRule
from tests.gpu import (
    check_delta_net,
    check_experts,
    check_grouped,
    check_matmul,
    check_route,
    expert_cases,
)
from tests.gpu.check_delta_net import Shape, span
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("gpu"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    for check in (check_delta_net, check_experts, check_grouped, check_matmul, check_route):
        monkeypatch.setattr(check, "DEVICE", "cpu")


def test_delta_net_has_the_same_bits_however_columns_are_shared() -> None:
    spans = (span(0, 3, 5, 0), span(4, 1, 0, 2))
    assert check_delta_net.check_columns(Shape(4, 2, tiled=False), spans, 6)


@pytest.mark.parametrize("columns", [16, 32])
def test_delta_net_row_after_row_agrees_with_the_reference(columns: int) -> None:
    spans = (span(0, 1, 7, 4), span(1, 3, 2, 1), span(4, 2, 0, 0))
    assert check_delta_net.check(Shape(4, 2, columns == 32), spans, 8, columns)


@pytest.mark.parametrize("room", [227, 99, 64])  # KiB of shared memory: H200, RTX 30 to 50, RTX 20
@pytest.mark.parametrize("processors", [132, 1])  # narrow blocks and wide ones, where they fit
def test_delta_net_in_chunks_agrees_with_the_reference(
    gpu: SimpleNamespace, processors: int, room: int
) -> None:
    gpu.multi_processor_count = processors
    gpu.shared_memory_per_block_optin = room << 10
    spans = (span(0, 65, 0, 3), span(65, 17, 100, 0), span(90, 2, 0, 5))
    assert check_delta_net.check(Shape(4, 2, tiled=processors > 1), spans, 96)


def test_delta_net_in_chunks_has_the_same_bits_however_it_is_divided() -> None:
    assert check_delta_net.fitting_blocks() == check_delta_net.BLOCKS
    spans = (span(0, 70, 9, 1), span(71, 7, 2, 0))
    assert check_delta_net.check_blocks(Shape(4, 2, tiled=True), spans, 79)


@pytest.mark.parametrize("blocks", check_delta_net.BLOCKS[1::2], ids=str)
def test_decays_that_leave_nothing_do_not_overflow_within_a_chunk(
    monkeypatch: pytest.MonkeyPatch, blocks: ChunkBlocks
) -> None:
    shape = Shape(4, 2, tiled=True)
    made = check_delta_net.make_weights(shape)
    forgetful = replace(made, decay=torch.tensor([-80.0, -1e-3, -80.0, -5.0]))
    monkeypatch.setattr(check_delta_net, "make_weights", lambda shape: forgetful)
    assert check_delta_net.check(shape, (span(0, 70, 5, 0),), 70, blocks)


@pytest.mark.parametrize(
    ("states", "processors", "room", "blocks"),
    [
        (48, 132, 227, (64, 128)),  # the 27B on an H200
        (32, 132, 227, (32, 128)),  # the 35B-A3B
        (48, 108, 163, (64, 64)),  # A100
        (16, 108, 163, (32, 128)),
        (48, 128, 99, (64, 64)),  # RTX 4090
        (32, 128, 99, (32, 64)),
        (32, 28, 99, (64, 64)),  # RTX 3060
        (48, 46, 64, (32, 64)),  # RTX 2080
    ],
)
def test_blocks_in_chunks_are_those_that_fit_a_gpu(
    states: int, processors: int, room: int, blocks: tuple[int, int]
) -> None:
    found = delta_net.blocks_for(states, processors, room << 10)
    assert found == ChunkBlocks(*blocks)
    assert max(found.run_bytes, found.prepare_bytes) <= room << 10


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


def test_logits_that_are_nan_or_infinite_change_no_counts_of_other_layers() -> None:
    counts = torch.zeros(3, 40, dtype=torch.int64)
    for number in (float("nan"), float("inf"), -float("inf")):
        logits = torch.full((2, 41), number)
        ids, _ = route.route(logits, RouterRule(4, "softmax", True, 1.0), None, counts[1], None)
        assert ((ids >= 0) & (ids < 40)).all()
    assert counts.sum(1).tolist() == [0, 3 * 2 * 4, 0]


def test_scores_do_not_depend_on_other_rows() -> None:
    assert check_route.check_scores(9, 72)


@pytest.mark.parametrize(("outputs", "hidden"), [(9, 72), (3, 2056)])
def test_rows_are_normed_scored_and_rounded_at_once(outputs: int, hidden: int) -> None:
    assert check_route.check_scored_rows(outputs, hidden)


@pytest.mark.parametrize(
    ("kinds", "sizes", "activation"),
    [
        (("q4_k", "q4_k", "q6_k"), (5, 256, 256), "silu"),
        (("mxfp4", "q8_0", "q4_1"), (4, 96, 288), "gelu"),
        (("q8_0", "q8_0", "bf16"), (4, 40, 32), "silu"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu_products")
def test_experts_agree_with_the_reference(
    kinds: tuple[str, str, str], sizes: tuple[int, int, int], activation: str
) -> None:
    assert check_experts.check(kinds, sizes, 3, 2, activation, "own")


@pytest.mark.parametrize("case", expert_cases.SHARED, ids=str)
def test_an_expert_that_every_row_visits_runs_beside_the_others(case: Any) -> None:
    for once in (False, True):
        with check_experts.reading_once(once):
            assert check_experts.check_shared(*case)


@pytest.mark.parametrize("case", expert_cases.ONCE, ids=str)
def test_rows_that_share_an_expert_have_the_bits_of_rows_that_read_it_each(case: Any) -> None:
    assert check_experts.check_once(*case)


@pytest.mark.parametrize(("scores", "biased"), [("softmax", False), ("sigmoid", True)])
def test_experts_picked_by_the_fused_kernel_are_those_of_the_router(
    scores: Any, biased: bool
) -> None:
    assert check_experts.check_chosen((70, 32, 256), RouterRule(3, scores, True, 1.5), biased)


def test_experts_of_a_row_do_not_depend_on_other_rows() -> None:
    for once in (False, True):
        with check_experts.reading_once(once):
            assert check_experts.check_alone(("q4_k", "q4_k", "q6_k"), (6, 256, 256), 3)


@pytest.mark.parametrize("dtype", check_grouped.LIMITS)
def test_grouped_products_agree_with_float64(dtype: str) -> None:
    assert check_grouped.check((5, 40, 72), 90, 2, dtype)


@pytest.mark.parametrize("name", check_matmul.KINDS)
def test_packed_products_agree_with_float64(name: str) -> None:
    assert check_matmul.check(name, 40, 512, 9)


def test_packed_products_fill_outputs_that_lie_one_after_another() -> None:
    for kind in ("q5_k", "bf16"):
        assert check_matmul.check_outputs(kind)


def test_blocks_take_tiles_in_turns_where_the_gpu_is_small(gpu: SimpleNamespace) -> None:
    gpu.multi_processor_count = 1
    gpu.shared_memory_per_multiprocessor = 1
    assert check_matmul.check("q4_k", 16 * 19, 256, 17)


@pytest.mark.parametrize(("name", "rows"), [("q8_0", 40), ("bf16", 40), ("q4_k", 16 * 201)])
def test_packed_products_run_where_blocks_have_little_shared_memory(
    gpu: SimpleNamespace, name: str, rows: int
) -> None:
    gpu.shared_memory_per_block_optin = 64 << 10
    assert check_matmul.check(name, rows, 1280 if rows == 40 else 256, 25)


@pytest.mark.parametrize("limit", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
def test_products_fit_into_the_shared_memory_of_a_block(limit: int) -> None:
    for record in map(record_bytes, TILED):
        for tiles, records in ((10, 1), (10, 5), (199, 20), (200, 20), (600, 68), (2500, 8)):
            products = [Product(tiles, records, record, rows) for rows in range(1, 33)]
            shapes = [shape_for(product, Gpu(limit)) for product in products]
            for product, shape in zip(products, shapes, strict=True):
                barriers = 8 * shape.warps * shape.stages + 16 * shape.ways * shape.shared
                assert shape.shared_bytes(record, product.groups) + barriers <= limit
                assert shape.split in {shape.ways, 2 * shape.ways}
                assert shape.warps <= 32
                assert product.rows > 1 or shape.ways == shape.split
            assert len({shape.split for shape in shapes}) == 1  # sums follow from it


def test_blocks_of_many_rows_spread_tiles_evenly_over_the_processors() -> None:
    def tiles_of_a_block(tiles: int, rows: int) -> int:
        return shape_for(Product(tiles, 20, 2304, rows), Gpu()).tiles

    assert tiles_of_a_block(2176, 16) == 6  # three turns of 132 blocks: 18, with four tiles 20
    assert tiles_of_a_block(1024, 16) == 8  # one turn: 8, with six tiles 12
    assert tiles_of_a_block(15520, 16) == 8  # 15 turns: 120, with two tiles 118
    assert tiles_of_a_block(320, 16) == 3  # one turn


@pytest.mark.parametrize("kind", sorted(quant.name for quant in TILED))
def test_a_rows_product_does_not_depend_on_other_rows(kind: str) -> None:
    assert check_matmul.check_alone(kind, 48, 1280)


def test_half_of_the_warps_take_sums_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(product: Product, gpu: Gpu) -> ProductShape:
        shape = shape_for(product, gpu)
        return shape if product.rows == 1 else replace(shape, ways=shape.split // 2)

    monkeypatch.setattr(matmul, "shape_for", halved)
    assert check_matmul.check_alone("q4_k", 48, 1280)
    assert check_matmul.check_alone("q4_k", 48, 2304)


@pytest.mark.parametrize(("tokens", "columns"), [(9, 384), (3, 96)])
def test_rows_in_halves_hold_what_they_stand_for(tokens: int, columns: int) -> None:
    assert check_matmul.check_rows(tokens, columns)
