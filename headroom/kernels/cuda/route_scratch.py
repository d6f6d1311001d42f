"""Scratch of routers: logits, and each row's top-k."""

from dataclasses import dataclass

from headroom.kernels.cuda.buffers import Buffer, Buffers, floats

ROUTER_THREADS = 256  # of a block of router.cu
MOST_HIDDEN = 8 * 4 * ROUTER_THREADS  # values of a row that these threads hold in registers


def can_score_with_norm(hidden: int) -> bool:
    """Return whether one kernel norms, rounds and scores rows of this width on the decode path."""
    return hidden % 8 == 0 and hidden <= MOST_HIDDEN


def logits(rows: int, outputs: int) -> Buffer:
    """Return the buffer of a router's logits."""
    return floats(rows, outputs)


@dataclass(frozen=True, slots=True)
class PickBuffers(Buffers):
    """The experts of each row, the best first."""

    ids: Buffer  # int32 [rows, used]
    weights: Buffer  # float32 [rows, used]


def picks(rows: int, used: int) -> PickBuffers:
    """Return the buffers of `used` experts a row."""
    return PickBuffers(Buffer((rows, used), "i32"), floats(rows, used))
