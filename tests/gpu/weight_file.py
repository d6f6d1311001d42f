"""A file of random weights, and a source that reads them as for a GPU."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch

from headroom.formats.quants import BY_NAME
from headroom.formats.tensor import TensorInfo
from headroom.kernels.ops import Case
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers.upload import Upload
from headroom.layers.weights import WeightSource
from tests.gpu.check_matmul import random_weight


class WeightFile:
    """Tensors that are written one after another; their sizes are counted when they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_bytes(b"header")
        self.counted: dict[str, int] = {}
        self._tensors: dict[str, tuple[int, str, tuple[int, ...]]] = {}

    def add(self, name: str, kind: str, *shape: int, repeats: int = 1) -> torch.Tensor:
        """Append a random tensor; return its bytes `[..., bytes per row]`.

        With repeats the tensor holds so many copies of the one returned, along a new dimension.
        """
        rows, columns = prod(shape[:-1]), shape[-1]
        if kind in PLAIN_TYPES:
            data = torch.randn(rows, columns).to(PLAIN_TYPES[kind]).view(torch.uint8)
        else:
            data = random_weight(kind, rows, columns).data
        whole = (repeats, *shape) if repeats > 1 else shape
        self._tensors[name] = self.path.stat().st_size, kind, whole
        with self.path.open("ab", buffering=0) as file:
            for _ in range(repeats):
                assert file.write(memoryview(data.numpy().reshape(-1))) == data.nbytes
        return data.view(*shape[:-1], -1)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, of the file as it is now."""
        whole = np.memmap(self.path, np.uint8, "r")
        return {
            name: TensorInfo(name, shape, BY_NAME[kind], self.path, offset, whole)
            for name, (offset, kind, shape) in self._tensors.items()
        }

    def source(self, upload: Upload, dtype: str = "bf16") -> WeightSource:
        """The weights as a GPU gets them."""
        case = Case(device="cuda", dtype=dtype)
        return WeightSource(self.tensors, case, False, self._count, upload=upload)

    def _count(self, line: str, size: int) -> None:
        self.counted[line] = self.counted.get(line, 0) + size
