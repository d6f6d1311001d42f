"""Products of rows sorted by expert: the CUDA kernel on the CPU, and whose rows a tile has."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.kernels.cuda import grouped
from headroom.kernels.cuda.experts_prefill import sort_picks
from headroom.kernels.cuda.grouped import grouped_product, product_way
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# A warp for every tile that there may be writes what it finds.
FIND_ALL = """
extern "C" __global__ void find_all(const int* ends, int experts, int* found) {
    const Tile tile = find_tile(ends, experts, blockIdx.x);
    int* to = found + 3 * blockIdx.x;
    to[0] = tile.expert, to[1] = tile.first, to[2] = tile.rows;
}
"""
TILE_ROWS = sorted(grouped.STAGES)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher run its kernel here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)


def ends_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def make(
    counts: Sequence[int], outputs: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """Return random rows (some of no expert), matrices, and the end of each expert's rows."""
    x = torch.randn(sum(counts) + 5, columns).to(dtype)
    return x, torch.randn(len(counts), outputs, columns).to(dtype), ends_of(counts)


@given(
    counts=st.lists(st.integers(0, 3) | st.integers(0, 300), min_size=1, max_size=80),
    rows=st.sampled_from(TILE_ROWS),
    nobodys=st.integers(0, 200),
)
@settings(deadline=None)
def test_every_row_is_in_one_tile_of_its_expert(counts: list[int], rows: int, nobodys: int) -> None:
    wanted = [
        (expert, first, min(rows, end - first))
        for expert, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0)))
        for first in range(begin, end, rows)
    ]
    most = grouped.most_tiles(sum(counts) + nobodys, len(counts), rows)
    assert len(wanted) <= most
    found = torch.full((most + 1, 3), -1, dtype=torch.int32)
    kernel = compile_on_cpu("grouped.cu", "find_all", {"ROWS": rows, "STAGES": 3}, FIND_ALL)
    kernel((most + 1,), (32,), (ends_of(counts), len(counts), found))
    tiles = [tuple(tile) for tile in found.tolist()]
    assert tiles[: len(wanted)] == wanted
    assert {rows for _, _, rows in tiles[len(wanted) :]} == {0}


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 256, 1000])
def test_the_last_expert_is_found_however_many_there_are(experts: int) -> None:
    found = torch.full((2, 3), -1, dtype=torch.int32)
    kernel = compile_on_cpu("grouped.cu", "find_all", {"ROWS": 64, "STAGES": 3}, FIND_ALL)
    kernel((2,), (32,), (ends_of([0] * (experts - 1) + [65]), experts, found))
    assert found.tolist() == [[experts - 1, 0, 64], [experts - 1, 64, 1]]


@given(picks=st.integers(0, 10_000), experts=st.integers(1, 600))
def test_tiles_that_there_can_be_are_no_more_than_needed(picks: int, experts: int) -> None:
    for rows in TILE_ROWS:
        # The worst: as many experts as can be have one row, and one has all others.
        used = min(picks, experts)
        counts = [1] * (used - 1) + [picks - used + 1] if used else []
        worst = sum(-(-count // rows) for count in counts)
        assert worst <= grouped.most_tiles(picks, experts, rows) <= picks // rows + used


SHAPES = [  # rows of each expert, outputs, columns
    ([3, 0, 70], 136, 72),
    ([0, 17, 0, 33, 1, 0], 40, 200),
    ([130], 8, 8),
    ([0, 0], 8, 8),
    ([49, 64, 65], 128, 32),
    ([20, 100], 264, 104),
    ([1, 1, 1, 1], 24, 288),
]


# Rows in f16 give their sums as they are, those in bf16 rounded.
RESULTS = {torch.bfloat16: (torch.bfloat16, 2**-8), torch.float16: (torch.float32, 1e-5)}


@pytest.mark.parametrize("dtype", RESULTS, ids=str)
@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_meet_their_experts_matrix(
    shape: tuple[list[int], int, int], rows: int, dtype: torch.dtype
) -> None:
    x, weights, ends = make(*shape, dtype)
    found, (kind, apart) = grouped.product(x, weights, ends, rows), RESULTS[dtype]
    assert found.dtype == kind
    first = 0
    for matrix, end in zip(weights, ends.tolist(), strict=True):
        wanted = x[first:end].double() @ matrix.double().T
        torch.testing.assert_close(found[first:end].double(), wanted, rtol=apart, atol=1e-4)
        first = end


def test_many_outputs_come_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "TILES_TOGETHER", 2)  # of five tiles
    x, weights, ends = make([3, 2], 520, 16)
    found = grouped.product(x, weights, ends, 64).double()
    for rows, matrix in ((slice(0, 3), weights[0]), (slice(3, 5), weights[1])):
        wanted = x[rows].double() @ matrix.double().T
        torch.testing.assert_close(found[rows], wanted, rtol=2**-8, atol=1e-4)


@given(tiles=st.integers(1, 500))
def test_turns_are_as_few_as_can_be_and_of_one_size(tiles: int) -> None:
    together, turns = grouped._spread(tiles)
    assert together <= grouped.TILES_TOGETHER
    assert turns == -(-tiles // grouped.TILES_TOGETHER)
    assert 0 <= together * turns - tiles < turns


@pytest.mark.parametrize("dtype", RESULTS, ids=str)
def test_rows_after_the_last_expert_are_left_alone(dtype: torch.dtype) -> None:
    x, weights, ends = make([3, 62], 24, 40, dtype)
    out = torch.full((len(x), 24), 7.0, dtype=RESULTS[dtype][0])
    kernel = grouped.kernels(dtype)[64]
    tiles = grouped.most_tiles(len(x), 2, 64)
    kernel((1, tiles), (grouped.GROUPED_THREADS,), (x, weights, ends, out, 2, 24, 40))
    assert (out[65:] == 7).all()
    assert (out[:65] != 7).any(1).all()


@pytest.mark.parametrize("dtype", RESULTS, ids=str)
def test_a_row_has_the_same_bits_whatever_it_comes_with(dtype: torch.dtype) -> None:
    x, weights, ends = make([9, 120, 30], 40, 424, dtype)
    whole = {rows: grouped.product(x, weights, ends, rows) for rows in TILE_ROWS}
    assert torch.equal(whole[64][:159], whole[128][:159])
    for row, expert in ((8, 0), (9, 1), (77, 1), (128, 1), (140, 2)):
        own = torch.zeros(3, dtype=torch.int32)
        own[expert:] = 1
        alone = grouped.product(x[row : row + 1], weights, own, 64)
        assert torch.equal(alone[0], whole[128][row])


def test_few_rows_of_an_expert_have_small_tiles() -> None:
    assert grouped.fitting_rows(33 * 8, 256) == 64
    assert grouped.fitting_rows(2048 * 8, 256) == 64
    assert grouped.fitting_rows(2056 * 8, 256) == 128
    assert grouped.fitting_rows(2048 * 8, 128) == 128


@pytest.mark.parametrize(
    ("capability", "version", "way"),
    [
        ((7, 5), "2.13", "loop"),
        ((8, 0), "2.13", "own"),
        ((8, 6), "2.13", "own"),
        ((8, 9), "2.9", "own"),
        ((9, 0), "2.9", "library"),
        ((10, 0), "2.12.1", "own"),
        ((10, 3), "2.13.0+cu130", "library"),
        ((11, 0), "2.13", "own"),
        ((12, 0), "2.13", "own"),
    ],
    ids=str,
)
def test_each_gpu_has_its_kind_of_grouped_product(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, way: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    assert product_way(torch.device("cuda", 0)) == way
    assert product_way(torch.device("cpu")) == "loop"


def test_rows_in_f16_ask_no_library_and_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, ends = make([3, 70], 16, 24, torch.float16)
    for way in ("library", "own", "loop"):
        monkeypatch.setattr(grouped, "product_way", lambda device, way=way: way)
        found = grouped.grouped_product(x, weights, ends, 2)
        assert torch.equal(found[:73], grouped.product(x, weights, ends, 64)[:73])


def test_small_groups_of_experts_have_the_tiles_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(grouped, "product_way", lambda device: "own")
    monkeypatch.setattr(grouped, "product", lambda *given: asked.append(given[3]))
    x, weights, ends = make([100, 100], 8, 8)
    for among in (2, 4, 64):
        grouped.grouped_product(x, weights, ends, among)
    assert asked == [128, 64, 64]


def test_each_row_meets_its_own_experts_matrix() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    x, weights = torch.randn(3, 8), torch.randn(5, 16, 8)
    picks = sort_picks(ids, 5)
    found = grouped_product(x[picks.rows], weights, picks.ends, 5)[picks.places]
    for row, rank in ((0, 0), (0, 1), (1, 1), (2, 0), (2, 1)):
        wanted = weights[ids[row, rank]] @ x[row]
        torch.testing.assert_close(found[row, rank], wanted)
