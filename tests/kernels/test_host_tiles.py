"""Experts that lie as a GPU reads them give a CPU the same bits as its own layout."""

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.sizes import TILED
from headroom.kernels.native import experts as native_experts
from headroom.kernels.native.experts import PanelTable
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import ExpertTable
from tests.gpu.torch_tiles import pack_tiles
from tests.kernels.cases import random_choice, random_experts

pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
EXPERTS = 4
NAMES = sorted(kind.name for kind in TILED)


def tile_table(table: ExpertTable) -> PanelTable:
    """The same experts in tiles."""
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_tiles_and_panels_give_the_same_bits(name: str, dtype: str, isa: str) -> None:
    hidden, width = (512, 256) if BY_NAME[name].block == 256 else (352, 96)
    check_bits(name, dtype, hidden, width)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_plain_tiles_that_fill_no_vector_give_the_same_bits(name: str, isa: str) -> None:
    check_bits(name, "f32", 300, 12)


def check_bits(name: str, dtype: str, hidden: int, width: int) -> None:
    """Assert that experts of a type say the same from both layouts."""
    torch.manual_seed(3)
    kinds = (BY_NAME[name],) * 3
    table = random_experts(kinds, EXPERTS, hidden, width)
    x = torch.randn(5, hidden)
    ids, weights = random_choice(5, EXPERTS, 2)
    wanted = native_experts.experts(x, ids, weights, native_experts.prepare(table), "silu", dtype)
    found = native_experts.experts(x, ids, weights, tile_table(table), "silu", dtype)
    assert torch.equal(found, wanted)


def test_picks_with_a_negative_id_are_passed_over() -> None:
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
