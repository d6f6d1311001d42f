"""WeightSource: named weights from the checkpoint onto the planned device."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch

from headroom.errors import DeviceError
from headroom.formats.quants import BY_NAME, F32
from headroom.formats.tensor import TensorInfo
from headroom.kernels.cuda.matmul import NARROW_QUANTS, TILES, Gates, TiledSize, narrow_type
from headroom.kernels.ops import Case, ExpertTable
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.registry import pick
from headroom.kernels.weight import PLAIN_TYPES, Weight, plain_type
from headroom.layers.host_memory import HostMemory, pin_limits
from headroom.layers.upload import FileMatrices, Upload
from headroom.plan.settings import PlanSettings
from headroom.units import gib

# CUDA kernels that are compiled in variants by the number of rows; loading notes which ones steps
# will need, so that they can be compiled before the first step.
KernelVariants = TiledSize | Gates


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Brings weights to a device, each once; `at` narrows it to one layer's names."""

    tensors: Mapping[str, TensorInfo]
    case: Case  # the device and the type that products compute in
    unpack: bool  # unpack weights to floats at load instead of at every use
    count: Callable[[str, int], None]  # told the plan's line and the bytes of each allocation
    prefix: str = ""
    line: str = "core_weights"
    norm_offset: float = 0.0  # added to the weights of norms
    upload: Upload | None = None  # to a GPU
    to_compile: set[KernelVariants] = field(default_factory=set)  # what steps of all layers need

    def at(self, prefix: str, line: str = "core_weights") -> "WeightSource":
        """Return the same source for the names below `prefix`, counted on another line."""
        return replace(self, prefix=prefix, line=line)

    def __call__(self, name: str, rows: torch.Tensor | None = None) -> Weight:
        """Return a matrix laid out for its product; `rows` gives another order of its rows."""
        if self.upload is not None and not self.unpack:
            return self._uploaded(self.found(name, rows), self.upload)
        weight = self.mapped(name, rows)
        kernel = pick("matmul", replace(self.case, quant=weight.quant))
        if self.unpack and kernel.backend == "cuda":
            return self._kept(weight)  # in rows, of just the size that the plan counts
        return self._kept(kernel.prepare(weight))

    def _uploaded(self, found: FileMatrices, upload: Upload) -> Weight:
        """A matrix on the GPU, in tiles where its kernel reads those."""
        kernel = pick("matmul", replace(self.case, quant=found.quant))
        if kernel.backend == "cuda":
            weight = Weight(upload.tiles([found]), found.quant, found.rows, found.columns, TILES)
        elif kernel.backend.startswith("cuda-plain"):  # in its type at once: no copy beside it
            values = upload.rows(found, narrow_type(self.case.dtype))
            weight = Weight(values, NARROW_QUANTS[self.case.dtype], found.rows, found.columns)
        else:
            weight = Weight(upload.rows(found), found.quant, found.rows, found.columns)
            upload.wait()  # what prepares it may read it
            weight = kernel.prepare(weight)
        self.took(weight)
        return weight

    def exact(self, name: str) -> Weight:
        """Return a small matrix in float32, laid out for its product, whatever its file's type."""
        info = self.tensors[self.prefix + name]
        rows, columns = info.shape
        values = dequantise(_bytes(info), info.quant, prod(info.shape)).view(rows, columns)
        kernel = pick("matmul", replace(self.case, quant=F32, dtype="f32"))
        return self._kept(kernel.prepare(Weight(values, F32, rows, columns)))

    def row(self, name: str) -> Weight:
        """Return a vector as a matrix of one row in float32, in the layout of files."""
        vector = self.vector(name)
        return Weight(vector.view(1, -1), F32, 1, vector.numel())

    def experts(self, count: int) -> ExpertTable:
        """Return a layer's experts as the file has them, mapped and not copied."""
        below = f"{self.prefix}ffn.experts."
        if f"{below}gate_up" in self.tensors:  # of each expert the gate's rows, then the up's
            both = self._mapped_experts(f"{below}gate_up", 2 * count)
            gate, up = both[::2], both[1::2]
        else:
            gate, up = (self._each_expert(part, count) for part in ("gate", "up"))
        return ExpertTable(gate, up, self._each_expert("down", count))

    def found_experts(self, count: int) -> tuple[tuple[FileMatrices, ...], ...]:
        """Return where a layer's gates, ups and downs lie, all experts of each."""
        below = f"{self.prefix}ffn.experts."
        if (both := self.tensors.get(f"{below}gate_up")) is not None:
            whole = _found(both, 2 * count)
            every_other = replace(whole, count=count, apart=2 * whole.matrix_bytes)
            ups = replace(every_other, offset=whole.offset + whole.matrix_bytes)
            gate_up: tuple[tuple[FileMatrices, ...], ...] = ((every_other,), (ups,))
        else:
            gate_up = tuple(self._find_experts(part, count) for part in ("gate", "up"))
        return (*gate_up, self._find_experts("down", count))

    def _find_experts(self, part: str, count: int) -> tuple[FileMatrices, ...]:
        below = f"{self.prefix}ffn.experts."
        if (every := self.tensors.get(f"{below}{part}")) is not None:
            return (_found(every, count),)
        return tuple(_found(self.tensors[f"{below}{i}.{part}"], 1) for i in range(count))

    def _each_expert(self, part: str, count: int) -> tuple[Weight, ...]:
        """One matrix of every expert, from one tensor for all or from one for each."""
        below = f"{self.prefix}ffn.experts."
        if f"{below}{part}" in self.tensors:
            return self._mapped_experts(f"{below}{part}", count)
        names = [f"{below}{expert}.{part}" for expert in range(count)]
        return tuple(weight for name in names for weight in self._mapped_experts(name, 1))

    def _mapped_experts(self, name: str, count: int) -> tuple[Weight, ...]:
        """The matrices that lie one after another in a tensor, in the file's layout."""
        info = self.tensors[name]
        columns = info.shape[-1]
        rows = prod(info.shape) // columns // count
        stored = _stored(info).view(count, rows, -1)
        return tuple(Weight(data, info.quant, rows, columns) for data in stored)

    def table(self, name: str, *, pinned: bool = False) -> Weight:
        """Return a matrix of which only rows are taken, as the file has it.

        A pinned one stays in host memory, where a GPU reads the rows that it wants.
        """
        if pinned:
            return self._pinned(self.mapped(name, None))
        if self.upload is None or self.unpack:
            return self._kept(self.mapped(name, None))
        found = self.found(name)
        table = Weight(self.upload.rows(found), found.quant, found.rows, found.columns)
        self.count(self.line, table.nbytes)
        return table

    def _pinned(self, weight: Weight) -> Weight:
        """The weight in host memory of just its size, which kernels read where it lies."""
        # No driver of AMD's is asked: the table's rows are copied there, see Embedding.
        memory = HostMemory(weight.nbytes, pin=self.case.device != "hip")
        if memory.refused:
            raise DeviceError(
                f"The GPU's driver does not pin {gib(weight.nbytes)} of host memory for the token "
                f"table: {memory.refused}{pin_limits()}.",
                hint="Free host memory, raise the limit of the control group, or leave room for "
                "the table on the GPU, with a shorter --context say.",
            )
        data = memory.bytes.view(weight.data.dtype).view(weight.data.shape).copy_(weight.data)
        self.count(self.line, weight.nbytes)
        return replace(weight, data=data, owner=memory)

    def vector(self, name: str) -> torch.Tensor:
        """Return a small tensor, a norm's weight say, as float32 in its file's shape."""
        info = self.tensors[self.prefix + name]
        values = dequantise(_bytes(info), info.quant, prod(info.shape))
        vector = values.view(info.shape).to(self.case.place, copy=True)
        self.count(self.line, vector.nbytes)
        return vector

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm's weight as it multiplies, whatever the file leaves out of it."""
        return self.vector(name).add_(self.norm_offset)

    def found(self, name: str, order: torch.Tensor | None = None) -> FileMatrices:
        """Return where a matrix lies in its file."""
        return replace(_found(self.tensors[self.prefix + name], 1), order=order)

    def mapped(self, name: str, order: torch.Tensor | None = None) -> Weight:
        """Return a weight in the file's layout, not copied where nothing about it changes."""
        info = self.tensors[self.prefix + name]
        columns = info.shape[-1]
        rows = info.nbytes // info.quant.bytes_for(columns)
        stored, quant = _stored(info).view(rows, -1), info.quant
        if order is not None:
            stored = stored[order]
        if self.unpack:
            dtype = self.case.dtype if self.case.dtype in PLAIN_TYPES else "f32"
            floats = stored if quant.name in PLAIN_TYPES else dequantise(stored, quant, columns)
            stored, quant = floats.to(plain_type(dtype)), BY_NAME[dtype]
        return Weight(stored, quant, rows, columns)

    def _kept(self, weight: Weight) -> Weight:
        """The weight in memory of its own, counted."""
        if weight.layout == "rows":
            weight = replace(weight, data=weight.data.to(self.case.place, copy=True))
        self.took(weight)
        return weight

    def took(self, weight: Weight) -> None:
        """Count a weight on its device, and foresee its products."""
        self.count(self.line, weight.nbytes)
        if weight.layout == TILES:
            self.to_compile.add(TiledSize(weight.quant, weight.rows, weight.columns))


def open_weights(
    tensors: Mapping[str, TensorInfo],
    device: str,
    settings: PlanSettings,
    count: Callable[[str, int], None],
    norm_offset: float = 0.0,
    upload: Upload | None = None,
) -> WeightSource:
    """Return a source that brings weights to a device of the plan as its settings say."""
    case = Case(
        device=device.partition(":")[0],  # not torch's name, which is cuda for AMD, too
        dtype=settings.compute_type,
        reference=settings.kernels == "reference",
        triton=settings.kernels == "triton",
    )
    unpack = settings.weights == "unpacked"
    return WeightSource(tensors, case, unpack, count, norm_offset=norm_offset, upload=upload)


def _found(info: TensorInfo, count: int) -> FileMatrices:
    """Where the matrices lie that follow each other in a tensor."""
    columns = info.shape[-1]
    rows = prod(info.shape) // columns // count
    return FileMatrices(info.name, info.path, info.quant, rows, columns, info.offset, count)


def _stored(info: TensorInfo) -> torch.Tensor:
    """The file's own bytes, mapped; as floats for plain types."""
    data = _bytes(info)
    return data.view(PLAIN_TYPES[info.quant.name]) if info.quant.name in PLAIN_TYPES else data


def _bytes(info: TensorInfo) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of read-only maps; nothing here writes to one
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(info.data())
