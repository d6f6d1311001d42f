"""Blocks of files packed into tiles by the CUDA kernel, run on the CPU, against plain torch."""

from pathlib import Path

import pytest
import torch

from headroom.kernels.cuda import matmul, pack
from headroom.kernels.cuda.matmul import TILES
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import Weight
from tests.gpu import check_load
from tests.gpu.check_matmul import KINDS, random_weight
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(check_load, "DEVICE", "cpu")


PLAIN = ("f16", "bf16")


@pytest.mark.parametrize("name", [*KINDS, *PLAIN])
def test_tiles_hold_what_plain_torch_puts_there(name: str) -> None:
    assert check_load.check(name, 32, 512)
    assert check_load.check(name, 21, 256, matrices=3)
    assert check_load.check(name, 37, 1280, ordered=True)


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "mxfp4", *PLAIN])
def test_rows_that_do_not_fill_a_record_are_filled_up_with_zeros(name: str) -> None:
    assert check_load.check(name, 18, 288, matrices=2)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_rows_of_few_columns_are_filled_up_with_zeros(name: str) -> None:
    assert check_load.check(name, 18, 40, matrices=2)
    assert check_load.check(name, 3, 264)


def test_weights_of_every_sort_arrive_through_buffers_smaller_than_they_are(
    tmp_path: Path,
) -> None:
    assert check_load.check_upload(tmp_path, check_load.STAGINGS[0])


@pytest.mark.parametrize("name", [*KINDS, *PLAIN])
def test_tiles_have_the_values_of_the_file(name: str) -> None:
    weight = random_weight(name, 19, 512)
    tiles = torch.empty(tile_bytes(weight.quant, 19, 512), dtype=torch.uint8)
    pack.pack(weight.data, weight.quant, 19, 512, tiles)
    found = torch.full((19, 512), float("nan"), dtype=torch.bfloat16)
    matmul.dequantise(Weight(tiles, weight.quant, 19, 512, TILES), found)
    wanted = dequantise(weight.data, weight.quant, 512).view(19, 512)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=0)
