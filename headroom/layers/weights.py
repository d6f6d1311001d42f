"""WeightSource: named weights from the checkpoint onto the planned device."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from headroom.formats.quants import BY_NAME
from headroom.formats.tensor import TensorInfo
from headroom.kernels.reference.dequant import dequantise
from headroom.kernels.weight import PLAIN_TYPES, Weight, plain_type


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Brings weights to a device, each once; `at` narrows it to one layer's names."""

    tensors: Mapping[str, TensorInfo]
    device: str
    dtype: str  # that products compute in
    unpack: bool  # unpack weights to `dtype` at load instead of at every use
    count: Callable[[str, int], None]  # told the plan's line and the bytes of each allocation
    prefix: str = ""
    line: str = "core_weights"

    def at(self, prefix: str, line: str = "core_weights") -> "WeightSource":
        """Return the same source for the names below `prefix`, counted on another line."""
        return replace(self, prefix=prefix, line=line)

    def __call__(self, name: str, rows: torch.Tensor | None = None) -> Weight:
        """Return a matrix; `rows` gives another order of its rows."""
        info = self.tensors[self.prefix + name]
        columns = info.shape[-1]
        count = info.nbytes // info.quant.bytes_for(columns)
        stored = _stored(info).view(count, -1)
        if rows is not None:
            stored = stored[rows]
        quant = info.quant
        if self.unpack:
            stored, quant = self._unpack(stored, info, columns), BY_NAME[self.dtype]
        weight = Weight(stored.to(self.device, copy=True), quant, count, columns)
        self.count(self.line, weight.nbytes)
        return weight

    def vector(self, name: str) -> torch.Tensor:
        """Return a small tensor, a norm's weight say, as float32 in its file's shape."""
        info = self.tensors[self.prefix + name]
        values = dequantise(_bytes(info), info.quant, prod(info.shape))
        vector = values.view(info.shape).to(self.device, copy=True)
        self.count(self.line, vector.nbytes)
        return vector

    def _unpack(self, stored: torch.Tensor, info: TensorInfo, columns: int) -> torch.Tensor:
        if info.quant.name in PLAIN_TYPES:
            return stored.to(plain_type(self.dtype))
        return dequantise(stored, info.quant, columns).to(plain_type(self.dtype))


def _stored(info: TensorInfo) -> torch.Tensor:
    """The file's own bytes, mapped; as floats for plain types."""
    data = _bytes(info)
    return data.view(PLAIN_TYPES[info.quant.name]) if info.quant.name in PLAIN_TYPES else data


def _bytes(info: TensorInfo) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of read-only maps; nothing here writes to one
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(info.data())
