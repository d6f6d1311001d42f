"""Weight: a matrix on a device, in the packed form of its type; and the types of weights."""

from dataclasses import dataclass

import torch

from headroom.formats.quants import BF16, F16, F32, QuantType

PLAIN_TYPES = {F32.name: torch.float32, F16.name: torch.float16, BF16.name: torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix `[rows, columns]`; a row is a whole number of its type's blocks."""

    data: torch.Tensor  # uint8 [rows, bytes per row]; for plain types floats [rows, columns]
    quant: QuantType
    rows: int
    columns: int
    layout: str = "rows"  # "rows" as in the file, or the name of a backend's layout
    owner: object = None  # keeps the memory of `data` alive, if torch does not own it

    @property
    def nbytes(self) -> int:
        """The bytes of the weight on its device."""
        return self.data.numel() * self.data.element_size()


def plain_type(name: str) -> torch.dtype:
    """Return the torch type of `f32`, `f16` or `bf16`."""
    return PLAIN_TYPES[name]
