"""WeightSource: loads named weights from the checkpoint to the planned device."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from headroom.errors import DeviceError
from headroom.formats.quants import BY_NAME, F32
from headroom.formats.tensor import ComposedTensor, TensorInfo
from headroom.kernels.cuda.matmul import NARROW_QUANTS, TILES, narrow_type
from headroom.kernels.ops import Case, ExpertBiases, ExpertTable
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.registry import pick
from headroom.kernels.weight import PLAIN_TYPES, Weight, plain_type
from headroom.layers.host_memory import HostMemory, pin_limits
from headroom.layers.upload import FileMatrices, Upload
from headroom.plan.settings import PlanSettings
from headroom.units import gib


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Loads named weights of a checkpoint to a device, each laid out for the kernel that reads it.

    `at` returns a source for the names of one layer.
    """

    tensors: Mapping[str, TensorInfo]
    case: Case  # the device and the type that products compute in
    unpack: bool  # unpack weights to floats at load instead of at every use
    count: Callable[[str, int], None]  # told the plan's line and the bytes of each allocation
    prefix: str = ""
    line: str = "core_weights"
    norm_offset: float = 0.0  # added to the weights of norms
    upload: Upload | None = None  # None on a CPU

    def at(self, prefix: str, line: str = "core_weights") -> "WeightSource":
        """Return a source for the names below `prefix`, counted on the plan's line `line`."""
        return replace(self, prefix=prefix, line=line)

    def __call__(self, name: str, order: torch.Tensor | None = None) -> Weight:
        """Return a matrix laid out for its product; `order`, if given, reorders its rows."""
        if self.upload is not None and not self.unpack:
            return self._upload(self.locate(name, order), self.upload)
        weight = self.from_file(name, order)
        kernel = pick("matmul", replace(self.case, quant=weight.quant))
        if self.unpack and kernel.backend == "cuda":
            return self._copy(weight)  # as rows: tiles are padded, and the plan counts no padding
        return self._copy(kernel.prepare(weight))

    def _upload(self, found: FileMatrices, upload: Upload) -> Weight:
        """Return a matrix on the GPU, in tiles if its kernel reads tiles."""
        kernel = pick("matmul", replace(self.case, quant=found.quant))
        if kernel.backend == "cuda":
            weight = Weight(upload.tiles([found]), found.quant, found.rows, found.columns, TILES)
        elif kernel.backend.startswith("cuda-plain"):
            # Converted while it is loaded: a second copy in the file's type would not be planned.
            values = upload.rows(found, narrow_type(self.case.dtype))
            weight = Weight(values, NARROW_QUANTS[self.case.dtype], found.rows, found.columns)
        else:
            weight = Weight(upload.rows(found), found.quant, found.rows, found.columns)
            upload.wait()  # `prepare` may read the weight
            weight = kernel.prepare(weight)
        self.note_loaded(weight)
        return weight

    def float32(self, name: str) -> Weight:
        """Return a small matrix in float32, laid out for its product, whatever its file's type."""
        info = self.tensors[self.prefix + name]
        rows, columns = info.shape
        values = dequantise(_bytes(info), info.quant, prod(info.shape)).view(rows, columns)
        kernel = pick("matmul", replace(self.case, quant=F32, dtype="f32"))
        return self._copy(kernel.prepare(Weight(values, F32, rows, columns)))

    def row(self, name: str) -> Weight:
        """Return a vector as a matrix of one row in float32, in the layout of files."""
        vector = self.vector(name)
        return Weight(vector.view(1, -1), F32, 1, vector.numel())

    def vector(self, name: str) -> torch.Tensor:
        """Return a small tensor, such as a norm's weight, as float32 in its file's shape."""
        info = self.tensors[self.prefix + name]
        values = dequantise(_bytes(info), info.quant, prod(info.shape))
        vector = values.view(info.shape).to(self.case.torch_device, copy=True)
        self.count(self.line, vector.nbytes)
        return vector

    def norm(self, name: str) -> torch.Tensor:
        """Return a norm's weight; some files hold the weight less an offset, which is added."""
        return self.vector(name).add_(self.norm_offset)

    def table(self, name: str, *, pinned: bool = False) -> Weight:
        """Return a matrix of which kernels read single rows, in the file's layout.

        A pinned table stays in host memory, where a GPU reads its rows.
        """
        if pinned:
            return self._pin(self.from_file(name))
        if self.upload is None or self.unpack:
            return self._copy(self.from_file(name))
        found = self.locate(name)
        table = Weight(self.upload.rows(found), found.quant, found.rows, found.columns)
        self.count(self.line, table.nbytes)
        return table

    def _pin(self, weight: Weight) -> Weight:
        """Return the weight in pinned host memory of exactly its size."""
        # Not pinned for AMD's GPUs: there the host copies the table's rows, see Embedding.
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

    def locate(self, name: str, order: torch.Tensor | None = None) -> FileMatrices:
        """Return where a matrix lies in its file."""
        return replace(_locate(self.tensors[self.prefix + name], 1), order=order)

    def locate_experts(self, count: int) -> tuple[tuple[FileMatrices, ...], ...]:
        """Return where a layer's gates, ups and downs lie: three tuples, all experts in each."""
        below = f"{self.prefix}ffn.experts."
        if (both := self.tensors.get(f"{below}gate_up")) is not None:
            whole = _locate(both, 2 * count)
            gates = replace(whole, count=count, apart=2 * whole.matrix_bytes)
            ups = replace(gates, offset=whole.offset + whole.matrix_bytes)
            gate_up: tuple[tuple[FileMatrices, ...], ...] = ((gates,), (ups,))
        else:
            gate_up = tuple(self._locate_part(part, count) for part in ("gate", "up"))
        return (*gate_up, self._locate_part("down", count))

    def _locate_part(self, part: str, count: int) -> tuple[FileMatrices, ...]:
        """Return where one matrix of every expert lies: in one tensor, or in one per expert."""
        below = f"{self.prefix}ffn.experts."
        if (every := self.tensors.get(f"{below}{part}")) is not None:
            return (_locate(every, count),)
        return tuple(_locate(self.tensors[f"{below}{i}.{part}"], 1) for i in range(count))

    def from_file(self, name: str, order: torch.Tensor | None = None) -> Weight:
        """Return a weight in the file's layout; it is a view of the mapped file if possible.

        An order of rows, or unpacking, makes a copy.
        """
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

    def experts_from_file(self, count: int) -> ExpertTable:
        """Return a layer's experts in the file's layout; views of the mapped file if possible."""
        below = f"{self.prefix}ffn.experts."
        if f"{below}gate_up" in self.tensors:  # each expert's gate rows, then its up rows
            both = self._map_experts(f"{below}gate_up", 2 * count)
            gate, up = both[::2], both[1::2]
        else:
            gate, up = (self._map_part(part, count) for part in ("gate", "up"))
        return ExpertTable(gate, up, self._map_part("down", count))

    def expert_biases(self) -> ExpertBiases:
        """Return the biases of a layer's experts on the device, in float32."""
        below = "ffn.experts."
        if f"{self.prefix}{below}gate_up_bias" in self.tensors:
            gate, up = self.vector(f"{below}gate_up_bias").chunk(2, dim=1)
        else:
            gate, up = self.vector(f"{below}gate_bias"), self.vector(f"{below}up_bias")
        return ExpertBiases(gate, up, self.vector(f"{below}down_bias"))

    def _map_part(self, part: str, count: int) -> tuple[Weight, ...]:
        """Return one matrix of every expert, from one tensor or from one per expert."""
        below = f"{self.prefix}ffn.experts."
        if f"{below}{part}" in self.tensors:
            return self._map_experts(f"{below}{part}", count)
        names = [f"{below}{expert}.{part}" for expert in range(count)]
        return tuple(weight for name in names for weight in self._map_experts(name, 1))

    def _map_experts(self, name: str, count: int) -> tuple[Weight, ...]:
        """Return the `count` matrices of one tensor, in the file's layout."""
        info = self.tensors[name]
        columns = info.shape[-1]
        rows = prod(info.shape) // columns // count
        stored = _stored(info).view(count, rows, -1)
        return tuple(Weight(data, info.quant, rows, columns) for data in stored)

    def _copy(self, weight: Weight) -> Weight:
        """Return a copy of the weight on the device, and count its bytes."""
        if weight.layout == "rows":
            weight = replace(weight, data=weight.data.to(self.case.torch_device, copy=True))
        self.note_loaded(weight)
        return weight

    def note_loaded(self, weight: Weight) -> None:
        """Count a weight that is on the device."""
        self.count(self.line, weight.nbytes)


def open_weights(
    tensors: Mapping[str, TensorInfo],
    device: str,
    settings: PlanSettings,
    count: Callable[[str, int], None],
    norm_offset: float = 0.0,
    upload: Upload | None = None,
) -> WeightSource:
    """Return a source that loads weights to a device of the plan as its settings say."""
    case = Case(
        device=device.partition(":")[0],  # the plan's name: torch calls AMD's GPUs cuda, too
        dtype=settings.compute_type,
        reference=settings.kernels == "reference",
        triton=settings.kernels == "triton",
    )
    unpack = settings.weights == "unpacked"
    return WeightSource(tensors, case, unpack, count, norm_offset=norm_offset, upload=upload)


def _locate(info: TensorInfo, count: int) -> FileMatrices:
    """Return where the `count` matrices of a tensor lie, one after another."""
    columns = info.shape[-1]
    rows = prod(info.shape) // columns // count
    composed = info if isinstance(info, ComposedTensor) else None
    offset = info.offset if composed is None else 0
    return FileMatrices(
        info.name, info.path, info.quant, rows, columns, offset, count, composed=composed
    )


def _stored(info: TensorInfo) -> torch.Tensor:
    """Return the mapped bytes of a tensor; floats for plain types."""
    data = _bytes(info)
    return data.view(PLAIN_TYPES[info.quant.name]) if info.quant.name in PLAIN_TYPES else data


def _bytes(info: TensorInfo) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of read-only memory, which nothing here writes
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(info.data())
