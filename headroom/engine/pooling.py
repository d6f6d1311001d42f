"""Pooling: the hidden states of a prompt's tokens become one vector."""

import numpy as np
import numpy.typing as npt

from headroom.engine.request import Pooling
from headroom.errors import RequestError

Vector = npt.NDArray[np.float32]
# Rows that are normed and copied to the host at a time: as many as a captured step has, so that
# no kernel is compiled for them and the memory beside the plan is small.
NORM_ROWS = 32


class PooledRows:
    """The hidden states of one prompt so far, after the final norm."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: npt.NDArray[np.float64] | None = None
        self._rows = 0  # that are in the total

    def add(self, position: int, state: Vector) -> None:
        """Take the state of the token at `position`.

        Positions come in order, but those of a preempted prompt come again and do not count twice.
        """
        if self._pooling == "last" or self._total is None:
            self._total, self._rows = state.astype(np.float64), 1
        elif position == self._rows:
            self._total += state
            self._rows += 1

    def vector(self) -> Vector:
        """Return the mean of the states, or the last one."""
        assert self._total is not None
        return (self._total / self._rows).astype(np.float32)


def check_dimensions(dimensions: int | None, hidden: int) -> None:
    """Refuse a length of vectors that a model with `hidden` values cannot give."""
    if dimensions is not None and not 1 <= dimensions <= hidden:
        raise RequestError(
            f"{dimensions} dimensions are asked for; this model's vectors have {hidden}.",
            hint=f"Ask for 1 to {hidden}, or leave `dimensions` out.",
            param="dimensions",
        )


def shaped(vector: Vector, dimensions: int | None = None) -> Vector:
    """Return the first `dimensions` values of a vector, scaled to length 1."""
    cut = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(cut))
    return (cut / length if length else cut).astype(np.float32)
