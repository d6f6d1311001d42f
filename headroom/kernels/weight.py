"""Weight: a matrix on a device, packed as its type says."""

from dataclasses import dataclass

import torch

from headroom.formats.quants import BF16, F16, F32, QuantType

PLAIN_TYPES = {F32.name: torch.float32, F16.name: torch.float16, BF16.name: torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix `[rows, columns]`; each row is a whole number of blocks."""

    data: torch.Tensor  # uint8 [rows, bytes per row]; for plain types floats [rows, columns]
    quant: QuantType
    rows: int
    columns: int
    layout: str = "rows"  # as in the file; or the name of a backend's own order
    owner: object = None  # of memory that is given back when nothing holds its owner any more

    @property
    def nbytes(self) -> int:
        """The bytes that the weight takes on its device."""
        return self.data.numel() * self.data.element_size()


def plain_type(name: str) -> torch.dtype:
    """Return the torch type of `f32`, `f16` or `bf16`."""
    return PLAIN_TYPES[name]
