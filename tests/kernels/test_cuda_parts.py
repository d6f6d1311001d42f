"""Weights unpacked part by part, and rows taken out of tiles: CUDA kernels on the CPU."""

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import (
    experts,
    few_experts,
    half_experts,
    matmul,
    narrow,
    pack,
    picks,
    scratch,
    small,
    unpacked,
)
from headroom.kernels.cuda.narrow import NarrowRows
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import Weight
from tests.gpu import check_experts
from tests.gpu.check_matmul import random_weight
from tests.gpu.torch_tiles import pack_tiles
from tests.kernels.cuda_on_cpu import COMPILER, compile_on_cpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def in_float32(
    x: torch.Tensor,
    matrix: torch.Tensor,
    out: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A product whose result is rounded as a GPU's is; not every CPU multiplies bf16."""
    assert out.dtype == (out_dtype or x.dtype)
    return out.copy_(torch.matmul(x.float(), matrix.float()))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    for module in (experts, few_experts, half_experts, matmul, narrow, pack, small, unpacked):
        monkeypatch.setattr(module, "compile_kernel", compile_on_cpu)
    monkeypatch.setattr(check_experts, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "mm", in_float32)


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
    found = small.embed(ids, table, torch.full((7, columns), float("nan")), 2.0)
    torch.testing.assert_close(found, 2 * values[ids], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [1, 40 * 2 * 256, 1 << 20])
@pytest.mark.parametrize("add", [False, True])
def test_a_product_by_parts_is_that_of_the_whole(most: int, add: bool) -> None:
    weight, values = tiled("q4_k", 90, 256)
    x = torch.randn(5, 256).bfloat16()
    before = torch.randn(5, 90)
    outs = [part.clone() for part in torch.split(before, [50, 40], dim=1)]
    arena = scratch.Arena(torch.empty(1 << 20, dtype=torch.uint8), unpack_bytes=most)
    with scratch.opened(arena), scratch.frame():
        unpacked.multiply(NarrowRows(x), weight, outs, add)
    wanted = x.float() @ values.T + (before if add else 0)
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted, rtol=0.02, atol=0.02 * wanted.std())
    parts = 90 * 256 * 2 + 5 * 90 * 2
    assert (arena.peak_bytes < parts) == (most < 1 << 20)


@pytest.mark.parametrize("add", [False, True])
def test_rows_beyond_f16_are_multiplied_in_it(add: bool) -> None:
    weight, values = tiled("q4_k", 90, 256)
    x = torch.randn(6, 256) * 10.0 ** torch.arange(-20, 28, 8)[:, None]
    before = x.abs().amax(1, keepdim=True) * torch.randn(6, 90)
    outs = [part.clone() for part in torch.split(before, [50, 40], dim=1)]
    unpacked.multiply(narrow.narrow_rows(x, torch.float16), weight, outs, add)
    wanted = x.double() @ values.T.double() + (before if add else 0)
    apart = (torch.cat(outs, dim=1) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert apart.max() < 1e-3


def test_rows_in_f16_have_its_precision_whatever_their_size() -> None:
    x = torch.randn(5, 300) * torch.tensor([1e-30, 1e-3, 1.0, 1e6, 1e30])[:, None]
    x[1] = 0
    x[2, 7] = 70000.0
    rows = narrow.narrow_rows(x[:, :290], torch.float16)
    assert rows.powers is not None
    found = rows.values.float() * rows.powers[:, None]
    wanted = x[:, :290]
    step = torch.maximum(wanted.abs() * 2**-11, wanted.abs().amax(1, keepdim=True) * 2**-33)
    assert ((found - wanted).abs() <= step).all()
    assert (rows.values.abs().amax(1) < 1024).all()


@pytest.mark.parametrize("each", [1, 2, 5])
def test_experts_in_groups_agree_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    monkeypatch.setattr(experts, "experts_at_once", lambda *sizes: each)
    assert check_experts.check(("q4_k", "q4_k", "q6_k"), (5, 256, 256), 9, 2, "silu")


def test_a_group_has_its_own_picks_first() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    sorted_ = picks.sort_picks(ids, 5)
    group = picks.expert_group(sorted_, 2, 2)
    assert (group.first, group.last) == (2, 3)
    assert group.start is not None
    assert group.start.tolist() == [2]
    assert group.rows[:3].tolist() == [0, 1, 2]
    assert group.ends.tolist() == [2, 3]
    assert picks.expert_group(sorted_, 0, 2).start is None
    assert picks.expert_group(sorted_, 4, 2).last == 4
