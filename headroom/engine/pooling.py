"""Pooling: makes one vector (an embedding) of the hidden states of a prompt's tokens."""

import numpy as np
import numpy.typing as npt

from headroom.engine.request import Pooling
from headroom.errors import ModelError, RequestError

Vector = npt.NDArray[np.float32]
# Rows that are normed and copied to the host at a time. A captured step has as many, so no further
# kernel is compiled, and little memory is needed beyond the plan.
NORM_ROWS = 32


class PooledRows:
    """The hidden states of one prompt so far, after the final norm."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._total: npt.NDArray[np.float64] | None = None
        self._rows = 0  # that are in the total

    def add(self, position: int, state: Vector) -> None:
        """Take the state of the token at `position`.

        Positions come in order. After a preemption they come again, and do not count twice.
        """
        if self._pooling == "last" or self._total is None:
            self._total, self._rows = state.astype(np.float64), 1
        elif position == self._rows:
            self._total += state
            self._rows += 1

    def vector(self) -> Vector:
        """Return the mean of the states, or the last one."""
        assert self._total is not None
        vector: Vector = (self._total / self._rows).astype(np.float32)
        if not np.isfinite(vector).all():
            raise ModelError("The model computed a vector with numbers that are not finite.")
        return vector


def check_dimensions(dimensions: int | None, hidden: int) -> None:
    """Raise RequestError unless `dimensions` is None or from 1 to `hidden`."""
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
