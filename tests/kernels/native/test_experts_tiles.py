"""Experts in the GPU's tiles give the CPU the same results as experts in panels."""

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.sizes import TILED
from headroom.kernels.native import experts as native_experts
from headroom.kernels.native.experts import PanelTable
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import ExpertTable
from headroom.kernels.weight import PLAIN_TYPES
from tests.gpu.torch_tiles import pack_tiles
from tests.kernels.cases import random_choice, random_experts

pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
EXPERTS = 4
NAMES = sorted(kind.name for kind in TILED)
WITH_WIDE_ROWS = ("amx", "avx512")  # for tiles these round 256 columns to 16 bits with one scale


def tile_table(table: ExpertTable) -> PanelTable:
    """Return the experts of a table in tiles."""
    rows = [
        torch.cat([pack_tiles(w.data, w.quant, w.columns) for w in expert])
        for expert in zip(*table.parts, strict=True)
    ]
    blobs = torch.stack(rows)
    sizes = [len(pack_tiles(p[0].data, p[0].quant, p[0].columns)) for p in table.parts]
    first = torch.arange(len(blobs)) * blobs.shape[1] + blobs.data_ptr()
    columns = [first, first + sizes[0], first + sizes[0] + sizes[1]]
    shapes = [(p[0].rows, p[0].columns) for p in table.parts]
    return PanelTable(torch.stack(columns, dim=1), table.kinds, shapes, blobs, tiles=True)


def random_layer(name: str) -> tuple[ExpertTable, int]:
    """Return experts of one type and their hidden size; types of 32 have a partial last record."""
    torch.manual_seed(3)
    kinds = (BY_NAME[name],) * 3
    hidden, width = (512, 256) if kinds[0].block == 256 else (352, 96)
    return random_experts(kinds, EXPERTS, hidden, width), hidden


def from_both(table: ExpertTable, hidden: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of the same rows with tiles and with panels."""
    x, (ids, weights) = torch.randn(5, hidden), random_choice(5, EXPERTS, 2)
    tiles, panels = tile_table(table), native_experts.prepare(table)
    found = native_experts.experts(x, ids, weights, tiles, "silu", dtype)
    return found, native_experts.experts(x, ids, weights, panels, "silu", dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["f32", "int24", "int8"])
def test_tiles_and_panels_give_the_same_values(name: str, dtype: str, isa: str) -> None:
    found, wanted = from_both(*random_layer(name), dtype)
    if dtype == "int24" and isa in WITH_WIDE_ROWS and name not in PLAIN_TYPES:
        # Of 16 bits; rounding to bf16 would cost 2e-3.
        assert (found - wanted).norm() < 2e-4 * wanted.norm()
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_plain_tiles_that_fill_no_vector_give_the_same_bits(name: str, isa: str) -> None:
    torch.manual_seed(3)
    table = random_experts((BY_NAME[name],) * 3, EXPERTS, 300, 12)
    found, wanted = from_both(table, 300, "f32")
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_times_tiles_is_the_same_alone_and_among_others(name: str, isa: str) -> None:
    table, hidden = random_layer(name)
    x, (ids, weights) = torch.randn(9, hidden), random_choice(9, EXPERTS, 3)
    tiles = tile_table(table)
    together = native_experts.experts(x, ids, weights, tiles, "gelu", "int24")
    for row in range(9):
        one = slice(row, row + 1)
        alone = native_experts.experts(x[one], ids[one], weights[one], tiles, "gelu", "int24")
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_or_infinity_spoils_its_own_result_only(bad: float, isa: str) -> None:
    table, hidden = random_layer("q4_0")
    x, (ids, weights) = torch.randn(2, hidden), random_choice(2, EXPERTS, 2)
    x[1, 7] = bad
    found = native_experts.experts(x, ids, weights, tile_table(table), "silu", "int24")
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e8])
def test_rows_of_any_magnitude_times_tiles_are_near_those_times_panels(
    scale: float, isa: str
) -> None:
    table, hidden = random_layer("q8_0")
    x, (ids, weights) = scale * torch.randn(2, hidden), random_choice(2, EXPERTS, 2)
    wanted = native_experts.experts(x, ids, weights, native_experts.prepare(table), "silu", "f32")
    found = native_experts.experts(x, ids, weights, tile_table(table), "silu", "int24")
    assert found.isfinite().all()
    torch.testing.assert_close(
        found, wanted, rtol=2e-3, atol=1e-30 + 3e-4 * float(wanted.abs().max())
    )


def test_picks_with_a_negative_id_are_skipped() -> None:
    torch.manual_seed(4)
    table = native_experts.prepare(random_experts((BY_NAME["q8_0"],) * 3, EXPERTS, 64, 32))
    x, (ids, weights) = torch.randn(3, 64), random_choice(3, EXPERTS, 2)
    kept = torch.tensor([[1, 0], [0, 0], [1, 1]], dtype=torch.bool)
    found = native_experts.experts(x, ids.masked_fill(~kept, -1), weights, table, "silu", "f32")
    wanted = native_experts.experts(x, ids, weights * kept, table, "silu", "f32")
    torch.testing.assert_close(found, wanted)
    assert not found[1].any()


def test_experts_of_32_bits_have_no_tiles() -> None:
    with pytest.raises(ValueError, match="F32 weights have no tiles"):
        MODULE.Matrix(0, BY_NAME["f32"].ggml_id, 16, 256, True)
