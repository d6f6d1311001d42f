"""What layers on a GPU will ask for, noted while they are loaded and compiled ahead of steps."""

from collections.abc import Iterable, Set

import torch

from headroom.kernels.cuda.compile import compile_ahead
from headroom.kernels.cuda.matmul import Gates, TiledSize

Foreseen = TiledSize | Gates  # each has kernels of its own for some numbers of rows


def compile_foreseen(foreseen: Set[Foreseen], rows: Iterable[int], place: str) -> None:
    """Compile, many at a time, what steps of such numbers of few rows will ask for on a GPU.

    What they ask for first is compiled one kernel after another.
    """
    if not foreseen:  # no GPU, or none with kernels that are compiled here
        return
    device, counts = torch.device(place), set(rows)
    compile_ahead(code for one in foreseen for count in counts for code in one.codes(count, device))
