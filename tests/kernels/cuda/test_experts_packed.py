"""Experts of short prompts: rows sorted by expert times packed tiles, CUDA kernels on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import (
    experts,
    experts_packed,
    experts_prefill,
    experts_scratch,
    scratch,
    sizes,
)
from headroom.kernels.cuda.buffers import ScratchCount
from headroom.kernels.cuda.compile import read_source
from headroom.kernels.cuda.experts_prefill import many_rows
from headroom.kernels.cuda.experts_scratch import ExpertShape, sorted_groups, sorted_rows
from headroom.kernels.cuda.sizes import TILED, record_bytes
from tests.gpu import check_experts
from tests.gpu.check_experts import make_table, to_tiles
from tests.gpu.expert_cases import Case
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import no_kernel, use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
GROUP, TILE = sizes.GROUP_ROWS, experts_scratch.TILE_PICKS


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let the launchers run their kernels here, as if on a GPU of the properties returned."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(experts_prefill, "_compile_unpacked", lambda *needed: None)
    monkeypatch.setattr(check_experts, "DEVICE", "cpu")
    properties = SimpleNamespace(
        shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


def sort(ids: torch.Tensor, count: int) -> tuple[list[int], list[list[int]]]:
    """The pick at each place, and of each tile its matrices, its first place and its rows."""
    groups, tiles = (sorted_groups(ids.numel(), count, rows) for rows in (GROUP, TILE))
    order = torch.full((groups * GROUP + 8,), -9, dtype=torch.int32)
    found = torch.full((tiles + 1, 8), -9, dtype=torch.int32)
    table = torch.arange(3 * count).view(count, 3)
    kernel = compile_on_cpu("sorted_rows.cu", "sort_picks", {"X_F16": 0})
    arguments = (ids, table, order, found, ids.numel(), groups, tiles)
    kernel((count,), (experts_packed.PACKED_SORT_THREADS,), arguments)
    assert (order[groups * GROUP :] == -9).all()
    assert (found[tiles:] == -9).all()
    return order[: groups * GROUP].tolist(), found[:tiles].tolist()


@given(
    rows=st.integers(1, 60),
    count=st.integers(1, 9),
    used=st.integers(1, 4),
    crowd=st.integers(0, 60),  # rows that all choose the last expert
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_every_pick_has_a_place_among_its_experts_and_is_in_one_tile(
    rows: int, count: int, used: int, crowd: int, seed: int
) -> None:
    ids = torch.randint(
        -1, count, (rows, used), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    ids[:crowd] = count - 1
    order, tiles = sort(ids, count)
    flat, seen = ids.flatten().tolist(), []
    for *words, first, height in tiles:
        if not height:
            continue
        expert = words[4] // 3
        assert words == [3 * expert, 0, 3 * expert + 1, 0, 3 * expert + 2, 0]
        assert 0 < height <= TILE
        assert first % GROUP == 0
        own = order[first : first + height]
        assert {flat[pick] for pick in own} == {expert}
        seen += own
        # Groups are padded with places without a pick.
        assert set(order[first + height : -(-(first + height) // GROUP) * GROUP]) <= {-1}
    wanted = [pick for expert in range(count) for pick, x in enumerate(flat) if x == expert]
    assert seen == wanted  # in order within an expert, too
    assert [pick for pick in order if pick >= 0] == wanted


CASES: list[Case] = [
    (("q4_k", "q4_k", "q6_k"), (2, 256, 256), 40, 2, "silu"),
    (("mxfp4", "q8_0", "q4_1"), (3, 64, 288), 45, 2, "gelu"),
    (("bf16", "f16", "bf16"), (4, 24, 40), 9, 2, "silu"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sorted_rows_agree_with_the_reference(case: Case) -> None:
    assert check_experts.check(*case, "sorted")


@pytest.mark.parametrize(("block", "all_"), [(99 << 10, 100 << 10), (64 << 10, 64 << 10)])
def test_blocks_of_other_gpus_come_to_the_same_bits(
    gpu: SimpleNamespace, block: int, all_: int
) -> None:
    kinds = ("q4_k", "q4_k", "q4_k")
    tiles, ids = to_tiles(make_table(kinds, 3, 48, 512)), torch.randint(0, 3, (40, 2)).int()
    x, weights = torch.randn(40, 512).bfloat16(), torch.rand(40, 2)
    large = many_rows(x, ids, weights, tiles, "silu")
    gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor = block, all_
    assert torch.equal(many_rows(x, ids, weights, tiles, "silu"), large)


@pytest.mark.parametrize("kind", ["q4_k", "bf16"])
def test_a_sorted_rows_result_does_not_depend_on_other_rows(kind: str) -> None:
    sides = (3, 32, 256 if kind == "q4_k" else 40)
    down = "q8_0" if kind == "q4_k" else kind  # whose rows may be short
    assert check_experts.check_sorted_alone((kind, kind, down), sides, 50, 2)


@pytest.mark.parametrize("memory", [(227 << 10, 228 << 10), (99 << 10, 100 << 10), (65536, 65536)])
@pytest.mark.parametrize("name", sorted(quant.name for quant in TILED))
def test_blocks_fit_and_several_warps_run_at_a_time(name: str, memory: tuple[int, int]) -> None:
    kind = BY_NAME[name]
    shape = experts_packed.packed_shape_for((kind, kind), *memory)
    assert shape.shared_bytes == shape.warps * shape.stages * 2 * record_bytes(kind)
    assert shape.shared_bytes + sizes.BLOCK_OVERHEAD_BYTES <= memory[0]
    running = shape.warps * (memory[1] // (shape.shared_bytes + 2048))
    plain = name in ("f16", "bf16")
    if memory[1] == 228 << 10:
        assert running >= (8 if plain else 12)
    else:
        assert running >= (2 if plain else 4)


@pytest.mark.parametrize(
    ("name", "warps", "stages"), [("q4_k", 8, 2), ("q6_k", 8, 1), ("q8_0", 8, 1), ("bf16", 8, 1)]
)
def test_an_h200_leaves_a_cache_to_rows(name: str, warps: int, stages: int) -> None:
    shape = experts_packed.packed_shape_for((BY_NAME[name],) * 2, 227 << 10, 228 << 10)
    assert (shape.warps, shape.stages) == (warps, stages)


def test_macros_are_the_launchers_numbers() -> None:
    source = read_source("sorted_rows.cu")
    assert f"#define ROWS {experts_scratch.TILE_PICKS} " in source
    assert f"#define SORT_WARPS {experts_packed.PACKED_SORT_THREADS // 32}\n" in source


def test_short_steps_are_sorted_and_long_ones_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    took = []
    monkeypatch.setattr(experts_packed, "sum_experts", lambda *given: took.append("sorted"))
    monkeypatch.setattr(experts_prefill, "sum_groups", lambda *given: took.append("unpacked"))
    where, cold = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(1, device="meta")
    table = experts.ExpertTiles(where, (), 8, 8, 0, ())
    most = sorted_rows(4, 2)
    assert most == experts_scratch.SORTED_PICKS * 2
    for rows in (33, most, most + 1):
        ids = torch.zeros(rows, 2, dtype=torch.int32)
        many_rows(torch.zeros(rows, 8), ids, ids.float(), table, "silu")
    assert took == ["sorted", "sorted", "unpacked"]
    elsewhere = replace(table, memory=(where, cold))
    ids = torch.zeros(33, 2, dtype=torch.int32)
    many_rows(torch.zeros(33, 8), ids, ids.float(), elsewhere, "silu")
    assert took[3:] == ["unpacked"]


def test_kernels_of_longer_steps_are_compiled_with_those_of_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    asked: list[tuple[str, str]] = []

    def note(source: str, name: str, defines: Mapping[str, int] | None = None) -> None:
        asked.append((source, name))

    use_kernels(monkeypatch, note)
    monkeypatch.setattr(experts_prefill, "product_way", lambda device: "own")
    kinds = (BY_NAME["q4_k"], BY_NAME["q4_k"], BY_NAME["q6_k"])
    for dtype, products in (
        (torch.bfloat16, [("many_experts.cu", "combine"), *[("grouped.cu", "grouped")] * 2]),
        (torch.float16, [("half_experts.cu", "combine"), *[("grouped.cu", "grouped")] * 2]),
    ):
        asked.clear()
        experts_prefill._compile_unpacked.__wrapped__(kinds, "silu", dtype, torch.device("cpu"))
        assert asked == [("unpack.cu", "unpack"), ("picks.cu", "sort_picks"), *products]


def peak_bytes(shape: Sequence[int], arena: scratch.Arena) -> int:
    """Of a step of (rows, experts, used, width, hidden), whose kernels do nothing."""
    rows, count, used, width, hidden = shape
    where, quant = torch.zeros(count, 3, dtype=torch.int64), BY_NAME["q4_k"]
    table = experts.ExpertTiles(where, (quant,) * 3, width, hidden, 0, ())
    ids = torch.zeros(rows, used, dtype=torch.int32)
    with scratch.opened(arena), scratch.frame():
        many_rows(torch.zeros(rows, hidden).bfloat16(), ids, ids.float(), table, "silu")
    return arena.peak_bytes


@pytest.mark.parametrize(
    "shape", [(64, 4, 2, 64, 256), (33, 8, 2, 48, 520), (40, 256, 8, 512, 2048)], ids=str
)
def test_scratch_of_sorted_rows_is_what_the_planner_counts(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    use_kernels(monkeypatch, no_kernel)
    rows, count, used, width, hidden = shape
    assert rows <= sorted_rows(count, used)
    counted = ScratchCount()
    experts_scratch.count_packed(counted, count, ExpertShape(width, hidden), rows * used)
    arena = scratch.Arena(torch.empty(0, dtype=torch.uint8))
    assert peak_bytes(shape, arena) == counted.peak_bytes


def test_a_step_without_rows_picks_no_expert() -> None:
    ids = torch.full((5, 2), -1, dtype=torch.int32)
    tiles = to_tiles(make_table(("q8_0", "q8_0", "q8_0"), 2, 32, 64))
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64)
    addends = experts.Addends(residual=residual)
    assert experts_prefill.sort_picks(ids, 2).ends.tolist() == [0, 0]
    found = many_rows(x, ids, torch.rand(5, 2), tiles, "silu", addends)
    assert torch.equal(found, residual)
