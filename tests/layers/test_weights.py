"""WeightSource: weights of a file reach a CPU with the values that the `gguf` package reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.formats.tensor import TensorInfo
from headroom.kernels.weight import PLAIN_TYPES, Weight
from headroom.layers.modules import Linear
from headroom.layers.upload import FileMatrices
from headroom.layers.weights import WeightSource, open_weights
from tests.plan.shapes import settings

EXPERTS, WIDTH, HIDDEN = 3, 32, 64
KINDS = ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"]


class Tensors:
    """Tensors quantised by the `gguf` package, one after another in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.floats: dict[str, torch.Tensor] = {}  # as the `gguf` package dequantises them
        self._placed: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        self._random = np.random.default_rng(0)
        path.write_bytes(b"header")

    def add(self, name: str, kind: str, *shape: int) -> torch.Tensor:
        """Append a random tensor, and return its values."""
        as_gguf = gguf.GGMLQuantizationType[kind.upper()]
        values = self._random.standard_normal(shape).astype(np.float32)
        stored = gguf.quants.quantize(values, as_gguf)
        self._placed[name] = self.path.stat().st_size, kind, shape
        with self.path.open("ab") as file:
            file.write(stored.tobytes())
        read = gguf.quants.dequantize(stored, as_gguf).astype(np.float32).reshape(shape)
        self.floats[name] = torch.from_numpy(read)
        return self.floats[name]

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        whole = np.memmap(self.path, np.uint8, "r")
        return {
            name: TensorInfo(name, shape, BY_NAME[kind], self.path, offset, whole)
            for name, (offset, kind, shape) in self._placed.items()
        }

    def read(self, part: FileMatrices) -> torch.Tensor:
        """Return the matrices that lie where `part` says, `[count, rows, columns]`."""
        raw = np.fromfile(self.path, np.uint8)
        as_gguf = gguf.GGMLQuantizationType[part.quant.name.upper()]
        apart, size = part.apart or part.matrix_bytes, part.matrix_bytes
        starts = [part.offset + number * apart for number in range(part.count)]
        rows = [raw[start : start + size].reshape(part.rows, -1) for start in starts]
        return torch.stack(
            [torch.from_numpy(gguf.quants.dequantize(x, as_gguf).astype(np.float32)) for x in rows]
        )


@pytest.fixture
def file(tmp_path: Path) -> Tensors:
    return Tensors(tmp_path / "weights")


def source(
    file: Tensors, counted: dict[str, int] | None = None, offset: float = 0.0, **changes: object
) -> WeightSource:
    def count(line: str, size: int) -> None:
        if counted is not None:
            counted[line] = counted.get(line, 0) + size

    return open_weights(file.infos, "cpu", settings(**changes), count, offset)


def values_of(weights: Sequence[Weight]) -> torch.Tensor:
    """Return the values of weights in the layout of files, `[weights, rows, columns]`."""
    as_gguf = gguf.GGMLQuantizationType[weights[0].quant.name.upper()]
    stored = [weight.data.contiguous().view(torch.uint8).numpy() for weight in weights]
    floats = [gguf.quants.dequantize(rows, as_gguf).astype(np.float32) for rows in stored]
    return torch.from_numpy(np.stack(floats))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_matrix_multiplies_with_the_values_of_its_file(
    file: Tensors, kind: str, weights: str, kernels: str, ordered: bool
) -> None:
    wanted = file.add("layers.0.w", kind, 48, HIDDEN)
    order = torch.arange(48).view(24, 2).flip(1).flatten() if ordered else None
    get = source(file, weights=weights, kernels=kernels).at("layers.0.")
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    found = Linear(get("w", order), get.case)(x)
    if order is not None:
        wanted = wanted[order]
    torch.testing.assert_close(found, (x.double() @ wanted.double().T).float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_a_loaded_weight_is_counted_on_its_line(file: Tensors, kind: str) -> None:
    for name in ("w", "norm", "table"):
        file.add(name, kind if name != "norm" else "f32", 48, HIDDEN)
    counted: dict[str, int] = {}
    get = source(file, counted)
    weight, vector, table = get("w"), get.vector("norm"), get.at("", "embeddings").table("table")
    stored = BY_NAME[kind].bytes_for(48 * HIDDEN)
    assert weight.nbytes == table.nbytes == stored
    assert counted == {"core_weights": stored + vector.nbytes, "embeddings": stored}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unpacked_type", ["f32", "bf16"])
def test_unpacked_weights_are_the_values_rounded_to_the_compute_type(
    file: Tensors, kind: str, unpacked_type: str
) -> None:
    wanted = file.add("w", kind, 48, HIDDEN)
    counted: dict[str, int] = {}
    get = source(file, counted, weights="unpacked", compute_type=unpacked_type)
    table = get.table("w")
    assert table.quant.name == unpacked_type
    assert torch.equal(table.data, wanted.to(PLAIN_TYPES[unpacked_type]))
    assert counted == {"core_weights": wanted.numel() * table.data.element_size()}


@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_become_float32(file: Tensors, kind: str) -> None:
    vector = file.add("v", kind, HIDDEN)
    matrix = file.add("m", kind, 4, HIDDEN)
    get = source(file)
    assert torch.equal(get.vector("v"), vector)
    assert torch.equal(get.row("v").data, vector[None])
    small = get.float32("m")
    assert (small.quant.name, small.rows, small.columns) == ("f32", 4, HIDDEN)
    assert torch.equal(small.data, matrix)


def test_an_offset_is_added_to_norms_alone_and_files_stay_as_they_are(file: Tensors) -> None:
    stored = file.add("norm", "f32", HIDDEN)
    get = source(file, offset=1.0)
    before = file.path.read_bytes()
    assert torch.equal(get.norm("norm"), stored + 1)
    assert torch.equal(get.vector("norm"), stored)
    assert file.path.read_bytes() == before


def add_experts(file: Tensors, how: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write a layer's experts in one of the three ways that files have; return their values."""
    below = "layers.0.ffn.experts."
    if how == "gate and up in one":
        both = file.add(f"{below}gate_up", "q8_0", EXPERTS, 2 * WIDTH, HIDDEN)
        down = file.add(f"{below}down", "q4_0", EXPERTS, HIDDEN, WIDTH)
        return both[:, :WIDTH], both[:, WIDTH:], down
    sizes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    if how == "parts":
        gate, up, down = (
            file.add(below + part, "q5_1", EXPERTS, *size) for part, size in sizes.items()
        )
        return gate, up, down
    for expert in range(EXPERTS):  # the parts of an expert beside each other
        for part, size in sizes.items():
            file.add(f"{below}{expert}.{part}", "q8_0", *size)
    gate, up, down = (
        torch.stack([file.floats[f"{below}{expert}.{part}"] for expert in range(EXPERTS)])
        for part in sizes
    )
    return gate, up, down


@pytest.mark.parametrize("how", ["parts", "gate and up in one", "one by one"])
def test_experts_are_found_however_a_file_lays_them_out(file: Tensors, how: str) -> None:
    wanted = add_experts(file, how)
    get = source(file).at("layers.0.")
    table = get.experts_from_file(EXPERTS)
    for weights, part in zip((table.gate, table.up, table.down), wanted, strict=True):
        assert torch.equal(values_of(weights), part)
    for places, part in zip(get.locate_experts(EXPERTS), wanted, strict=True):
        assert sum(place.count for place in places) == EXPERTS
        assert torch.equal(torch.cat([file.read(place) for place in places]), part)


def test_a_matrix_is_located_with_its_order(file: Tensors) -> None:
    wanted = file.add("a", "f16", 2, HIDDEN), file.add("b", "q8_0", 8, HIDDEN)
    order = torch.arange(8).flip(0)
    get = source(file)
    found = get.locate("b", order)
    assert found.order is order
    assert torch.equal(file.read(found)[0], wanted[1])
    assert torch.equal(file.read(get.locate("a"))[0], wanted[0])


@pytest.mark.parametrize(
    ("kernels", "dtype", "reference", "triton"),
    [("reference", "f32", True, False), ("triton", "f32", False, True),
     ("native", "int8", False, False)],
)  # fmt: skip
def test_a_source_is_opened_as_the_plans_settings_say(
    file: Tensors, kernels: str, dtype: str, reference: bool, triton: bool
) -> None:
    chosen = replace(settings(), kernels=kernels, compute_type=dtype)
    for device, kind in (("cpu", "cpu"), ("cuda:1", "cuda"), ("hip:0", "hip")):
        get = open_weights(file.infos, device, chosen, lambda line, size: None)
        assert (get.case.device, get.case.dtype) == (kind, dtype)
        assert (get.case.reference, get.case.triton, get.unpack) == (reference, triton, False)
    unpacked = replace(chosen, weights="unpacked")
    assert open_weights(file.infos, "cpu", unpacked, lambda line, size: None).unpack
