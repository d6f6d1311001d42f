"""Products with weights unpacked part by part, and rows taken out of tiles: CUDA on the CPU."""

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import matmul, scratch
from headroom.kernels.cuda.matmul import NarrowRows
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import Weight
from tests.gpu.check_matmul import random_weight
from tests.gpu.torch_tiles import pack_tiles
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.usefixtures("gpu_products"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)


def tiled(name: str, rows: int, columns: int) -> tuple[Weight, torch.Tensor]:
    """A random weight in tiles, and its values."""
    weight = random_weight(name, rows, columns)
    values = dequantise(weight.data, weight.quant, columns).view(rows, columns)
    data = pack_tiles(weight.data, weight.quant, columns)
    return Weight(data, weight.quant, rows, columns, matmul.TILES), values


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4"])
def test_rows_are_taken_out_of_tiles(name: str) -> None:
    columns = 512 if BY_NAME[name].block == 256 else 288
    table, values = tiled(name, 37, columns)
    ids = torch.tensor([36, 0, 7, 8, 15, 16, 7])
    found = matmul.embed(ids, table, torch.full((7, columns), float("nan")), 2.0)
    torch.testing.assert_close(found, 2 * values[ids], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [1, 40 * 2 * 256, 1 << 20])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("sizes", [[50, 40], [32, 4, 12, 44], [92]])
def test_a_product_by_parts_is_that_of_the_whole(most: int, add: bool, sizes: list[int]) -> None:
    weight, values = tiled("q4_k", sum(sizes), 256)
    x = torch.randn(5, 256).bfloat16()
    before = torch.randn(5, sum(sizes))
    outs = [part.clone() for part in torch.split(before, sizes, dim=1)]
    arena = scratch.Arena(torch.empty(1 << 20, dtype=torch.uint8), unpack_bytes=most)
    with scratch.opened(arena), scratch.frame():
        matmul.multiply_unpacked(NarrowRows(x), weight, outs, add)
    wanted = x.float() @ values.T + (before if add else 0)
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted, rtol=0.02, atol=0.02 * wanted.std())
    parts = sum(sizes) * 256 * 2 + 5 * sum(sizes) * 2
    assert (arena.peak_bytes < parts) == (most < 1 << 20)


def test_answers_come_to_outputs_that_lie_anywhere() -> None:
    weight, values = tiled("q8_0", 32, 64)
    x = torch.randn(3, 64).bfloat16()
    room = torch.zeros(3, 41)
    matmul.multiply_unpacked(NarrowRows(x), weight, (room[:, 1:17], room[:, 20:36]))
    wanted = (x.float() @ values.bfloat16().float().T).bfloat16().float()
    assert torch.equal(room[:, 1:17], wanted[:, :16])
    assert torch.equal(room[:, 20:36], wanted[:, 16:])
    assert not room[:, [0, *range(17, 20), *range(36, 41)]].any()


@pytest.mark.parametrize("add", [False, True])
def test_rows_beyond_f16_are_multiplied_in_it(add: bool) -> None:
    weight, values = tiled("q4_k", 90, 256)
    x = torch.randn(6, 256) * 10.0 ** torch.arange(-20, 28, 8)[:, None]
    before = x.abs().amax(1, keepdim=True) * torch.randn(6, 90)
    outs = [part.clone() for part in torch.split(before, [50, 40], dim=1)]
    matmul.multiply_unpacked(matmul.narrow_rows(x, torch.float16), weight, outs, add)
    wanted = x.double() @ values.T.double() + (before if add else 0)
    apart = (torch.cat(outs, dim=1) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert apart.max() < 1e-3


def test_rows_in_f16_have_its_precision_whatever_their_size() -> None:
    x = torch.randn(5, 300) * torch.tensor([1e-30, 1e-3, 1.0, 1e6, 1e30])[:, None]
    x[1] = 0
    x[2, 7] = 70000.0
    rows = matmul.narrow_rows(x[:, :290], torch.float16)
    assert rows.powers is not None
    found = rows.values.float() * rows.powers[:, None]
    wanted = x[:, :290]
    step = torch.maximum(wanted.abs() * 2**-11, wanted.abs().amax(1, keepdim=True) * 2**-33)
    assert ((found - wanted).abs() <= step).all()
    assert (rows.values.abs().amax(1) < 1024).all()
