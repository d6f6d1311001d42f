"""Weights through buffers to a device; the CPU stands in for it, with the GPU's kernels."""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headroom.errors import FormatError
from headroom.experts.cuda_ffn import upload_experts
from headroom.formats.quants import BY_NAME
from headroom.formats.tensor import ComposedTensor
from headroom.kernels.ops import Case
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers import upload
from headroom.layers.cuda_rows import load_merged
from headroom.layers.upload import Upload
from headroom.layers.weights import WeightSource
from tests.gpu.check_matmul import random_weight
from tests.gpu.torch_tiles import pack_tiles
from tests.gpu.weight_file import WeightFile
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers so small that every weight needs several, on the CPU."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(upload, "LEAST_STAGING_BYTES", 0)
    monkeypatch.setattr(upload, "BUFFER_STEP", 32)
    monkeypatch.setattr(upload, "READ_BYTES", 1000)


@pytest.fixture
def file(tmp_path: Path) -> WeightFile:
    return WeightFile(tmp_path / "weights")


class Left:
    """What an upload leaves open: descriptors of the weight file, and threads."""

    def __init__(self, file: WeightFile) -> None:
        self._path = os.path.realpath(file.path)
        # The source of the weights maps the file into memory, which keeps a descriptor.
        self._before = self._descriptors(), set(threading.enumerate())

    def _descriptors(self) -> set[str]:
        return {str(x) for x in OPEN_FILES.iterdir() if os.path.realpath(x) == self._path}

    def now(self) -> set[str]:
        """Descriptors and threads that have come since; other files and threads do not count."""
        descriptors, threads = self._before
        new = {thread.name for thread in set(threading.enumerate()) - threads}
        return self._descriptors() - descriptors | {x for x in new if x.startswith("upload")}


def tiles(data: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
    return pack_tiles(data, BY_NAME[kind], columns)


@pytest.mark.parametrize("staging", [4 * 10_000, 4 * 100_000])
def test_matrices_with_one_input_lie_in_tiles_one_after_another(
    file: WeightFile, staging: int
) -> None:
    first, second = file.add("q", "q4_k", 64, 512), file.add("k", "q4_k", 40, 512)
    third = file.add("v", "q6_k", 48, 512)
    order = torch.arange(64).view(4, 8, 2).transpose(1, 2).flatten()
    with Upload("cpu", staging) as way:
        stacked = load_merged(file.source(way), ["q", "k", "v"], [order, None, None])
    assert stacked.members == ((0, 1), (2,))
    joined = torch.cat((tiles(first[order], "q4_k", 512), tiles(second, "q4_k", 512)))
    assert torch.equal(stacked.weights[0].data, joined)
    assert torch.equal(stacked.weights[1].data, tiles(third, "q6_k", 512))
    assert file.counted == {"core_weights": sum(w.nbytes for w in stacked.weights)}


@dataclass(frozen=True, slots=True)
class ComposedWeights:
    """Tensors whose bytes are computed, and how often each was."""

    composed: dict[str, torch.Tensor]
    times: Counter[str] = field(default_factory=Counter)

    def tensor(self, name: str, kind: str, *shape: int) -> ComposedTensor:
        data = self.composed[name] = random_weight(kind, prod(shape[:-1]), shape[-1]).data

        def compose() -> Any:
            self.times[name] += 1
            return data.numpy().reshape(-1)

        empty = np.empty(0, np.uint8)
        return ComposedTensor(
            name, shape, BY_NAME[kind], Path("none"), 77, empty, (), "awq", compose
        )


def test_composed_tensors_are_computed_once_and_lie_in_tiles_as_others() -> None:
    weights = ComposedWeights({})
    tensors = {
        "q": weights.tensor("q", "q5_0", 64, 512),
        "ffn.experts.0.gate": weights.tensor("0.gate", "q5_0", 48, 256),
        "ffn.experts.1.gate": weights.tensor("1.gate", "q5_0", 48, 256),
        "ffn.experts.up": weights.tensor("up", "mxfp4", 2, 48, 256),
        "ffn.experts.down": weights.tensor("down", "q8_0", 2, 64, 256),
    }
    order = torch.arange(64).flip(0)
    with Upload("cpu", 4 * 10_000) as way:
        case = Case(device="cuda", dtype="bf16")
        source = WeightSource(tensors, case, False, lambda line, size: None, upload=way)
        query = load_merged(source, ["q"], [order])
        experts = [way.tiles(part).view(2, -1) for part in source.locate_experts(2)]
    data = weights.composed
    assert torch.equal(query.weights[0].data, tiles(data["q"][order], "q5_0", 512))
    gates = torch.stack([tiles(data[f"{i}.gate"], "q5_0", 256) for i in range(2)])
    assert torch.equal(experts[0], gates)
    for found, name, kind in ((experts[1], "up", "mxfp4"), (experts[2], "down", "q8_0")):
        both = [tiles(half, kind, 256) for half in data[name].chunk(2)]
        assert torch.equal(found, torch.stack(both))
    assert weights.times == dict.fromkeys(data, 1)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_matrices_of_16_bits_keep_their_numbers_in_tiles(
    file: WeightFile, kind: str, dtype: str
) -> None:
    first, second = file.add("gate", kind, 64, 96), file.add("up", kind, 70, 96)
    order = torch.arange(64).view(32, 2).flip(1).flatten()
    with Upload("cpu", 4 * 15_000) as way:
        stacked = load_merged(file.source(way, dtype), ["gate", "up"], [order, None])
    assert stacked.members == ((0, 1),)
    (weight,) = stacked.weights
    assert torch.equal(
        weight.data, torch.cat((tiles(first[order], kind, 96), tiles(second, kind, 96)))
    )
    assert (weight.quant.name, weight.layout) == (kind, "tiles")
    assert file.counted == {"core_weights": weight.nbytes}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("ordered", [False, True])
def test_matrices_of_f32_become_what_products_compute_in(
    file: WeightFile, ordered: bool, dtype: str
) -> None:
    data = file.add("w", "f32", 70, 96)
    order = torch.arange(70).view(35, 2).flip(1).flatten() if ordered else None
    with Upload("cpu", 4 * 15_000) as way:
        weight = load_merged(file.source(way, dtype), ["w"], [order]).weights[0]
    floats = data.flatten().view(torch.float32).view(70, 96)
    wanted = (floats if order is None else floats[order]).to(PLAIN_TYPES[dtype])
    assert torch.equal(weight.data.nan_to_num(7), wanted.nan_to_num(7))  # random bits may be none
    assert weight.quant.name == dtype


@pytest.mark.parametrize("kind", ["q6_k", "f16"])
def test_tables_keep_the_rows_of_their_file(file: WeightFile, kind: str) -> None:
    data = file.add("embed", kind, 50, 256)
    with Upload("cpu", 4 * 6000) as way:
        table = file.source(way).table("embed")
    assert table.layout == "rows"
    assert torch.equal(table.data.view(torch.uint8), data)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_single_matrix_is_laid_out_for_its_kernel(file: WeightFile, dtype: str) -> None:
    packed, halves = file.add("head", "q5_0", 33, 288), file.add("halves", "f16", 5, 64)
    plain, other = file.add("small", "f32", 5, 64), file.add("other", "q8_k", 5, 256)
    with Upload("cpu", 4 * 6000) as way:
        get = file.source(way, dtype)
        head, half, small, rows = (get(name) for name in ("head", "halves", "small", "other"))
    assert torch.equal(head.data, tiles(packed, "q5_0", 288))
    assert torch.equal(half.data, tiles(halves, "f16", 64))
    assert torch.equal(small.data, plain.view(torch.float32).to(PLAIN_TYPES[dtype]))
    assert small.quant.name == dtype
    assert torch.equal(rows.data, other)  # no product of the GPU's own takes it


def wanted_experts(parts: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[torch.Tensor]:
    columns = (256, 256, 64)
    return [
        torch.stack([tiles(expert, kind, width) for expert in part])
        for part, kind, width in zip(parts, kinds, columns, strict=True)
    ]


@pytest.mark.parametrize("staging", [4 * 3000, 4 * 30_000])
@pytest.mark.parametrize("how", ["parts", "gate and up in one", "one by one"])
def test_all_experts_of_a_layer_lie_in_tiles(file: WeightFile, how: str, staging: int) -> None:
    kinds = ("q4_k", "q4_k", "q8_0")
    if how == "gate and up in one":
        both = file.add("ffn.experts.gate_up", "q4_k", 5, 2 * 64, 256)
        parts = [both[:, :64], both[:, 64:]]
    elif how == "parts":
        parts = [file.add(f"ffn.experts.{part}", "q4_k", 5, 64, 256) for part in ("gate", "up")]
    else:
        names = [[f"ffn.experts.{i}.{part}" for i in range(5)] for part in ("gate", "up")]
        parts = [torch.stack([file.add(n, "q4_k", 64, 256) for n in part]) for part in names]
    parts.append(file.add("ffn.experts.down", "q8_0", 5, 256, 64))
    with Upload("cpu", staging) as way:
        table = upload_experts(file.source(way), 5)
    wanted = wanted_experts(parts, kinds)
    assert all(torch.equal(*both) for both in zip(table.memory, wanted, strict=True))
    where = [[expert.data_ptr() for expert in part] for part in table.memory]
    assert table.addresses.T.tolist() == where
    assert (table.width, table.hidden) == (64, 256)
    assert table.nbytes == sum(part.nbytes for part in wanted)


def test_a_file_that_was_cut_short_is_refused_with_the_tensor_and_the_numbers(
    file: WeightFile,
) -> None:
    file.add("a", "q8_0", 64, 256)
    file.add("b", "q8_0", 64, 256)
    size = file.path.stat().st_size
    os.truncate(file.path, size - 10)
    with pytest.raises(FormatError) as caught, Upload("cpu", 4 * 6000) as way:
        load_merged(file.source(way), ["a", "b"])
    assert str(caught.value) == (
        f"{file.path} ends at byte {size - 10}, and b needs bytes up to {size}. "
        "The file was cut short after it was opened: fetch it again."
    )


def test_a_file_that_cannot_be_read_is_refused_with_the_tensor_and_the_byte(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.add("a", "q8_0", 16, 256)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FormatError) as caught, Upload("cpu", 4 * 6000) as way:
        load_merged(file.source(way), ["a"])
    expected = f"Cannot read a at byte 6 of {file.path}: Input/output error."
    assert str(caught.value) == expected


def test_a_file_that_is_gone_is_refused(file: WeightFile) -> None:
    file.add("a", "q8_0", 16, 256)
    way = Upload("cpu", 4 * 6000)
    get = file.source(way)
    file.path.unlink()
    with pytest.raises(FormatError) as caught, way:
        load_merged(get, ["a"])
    assert str(caught.value) == f"Cannot read {file.path}: No such file or directory."


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="needs /proc")
def test_nothing_is_left_open_after_a_failure(file: WeightFile) -> None:
    file.add("a", "q8_0", 64, 256)
    file.add("b", "q8_0", 64, 256)
    way = Upload("cpu", 4 * 6000)
    get = file.source(way)
    os.truncate(file.path, 1000)
    left = Left(file)
    with pytest.raises(FormatError), way:
        load_merged(get, ["a", "b"])
    assert left.now() == set()


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="needs /proc")
def test_nothing_is_left_open_when_a_device_is_full(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.add("a", "q8_0", 64, 256)
    file.add("b", "f32", 64, 64)
    way = Upload("cpu", 4 * 6000)
    get, taken = file.source(way), torch.empty
    left = Left(file)

    def full(*shape: int, **how: object) -> torch.Tensor:
        if how["dtype"] == torch.bfloat16:
            raise torch.OutOfMemoryError
        return taken(*shape, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", full)
    # The caller that loads a model reports the error, with the planned bytes.
    with pytest.raises(torch.OutOfMemoryError), way:
        load_merged(get, ["a", "b"])
    assert left.now() == set()


def test_weights_on_a_cpu_need_no_way_to_it() -> None:
    with upload.open_upload("cpu", 1000) as way:
        assert way is None
