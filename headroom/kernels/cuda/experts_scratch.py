"""Scratch of routed experts: on the decode path, and on both prefill paths (packed, unpacked)."""

from dataclasses import dataclass
from typing import NamedTuple

from headroom.kernels.cuda.buffers import Buffer, Buffers, ScratchCount, floats
from headroom.kernels.cuda.matmul_scratch import half_rows
from headroom.kernels.cuda.sizes import EXPERT_STEP, GROUP_ROWS, RECORD_COLUMNS, steps_of

# With at most so many picks per expert, on average, packed tiles are multiplied; 0: never. They are
# decoded anew for every 32 rows; with more rows it takes less time to unpack an expert once and to
# use the fastest products. Measured 2026-11-15 on an H200, 256 experts of 512 x 2048 in Q4_K and
# Q6_K: 1.0 ms per layer with 64 picks (unpacked: 1.3 ms), 1.8 ms with 128.
SORTED_PICKS = 64
TILE_PICKS = 32  # most rows of an expert that are multiplied at once, see sorted.cu
ROW_TILE_WORDS = 4  # int64 words per tile of rows: addresses of its matrices, and its rows
CHOSEN_ROWS = 2  # most rows of a step for which `choose_gate_up` does the top-k, see experts.cu
# The fewest rows of a decode step that read each distinct expert once (shared_picks.cu): where cold
# experts cross the link, and where all are hot. There, reading one again takes less time than the
# third kernel of each layer, unless rows share many.
SHARED_ROWS_OVER_LINK, SHARED_ROWS = 2, 8


class ExpertShape(NamedTuple):
    """The sizes of an expert's matrices: gate and up `[width, hidden]`, down `[hidden, width]`."""

    width: int
    hidden: int


@dataclass(frozen=True, slots=True)
class DecodeBuffers(Buffers):
    """The buffers between the two kernels of the decode path."""

    inner: Buffer  # float32: values between up and down, of all picks, then of the shared expert
    downs: Buffer  # int64 [picks]: the address of each pick's down matrix


def decode_buffers(rows: int, used: int, width: int, shared_width: int) -> DecodeBuffers:
    """Return the buffers of few rows; `shared_width` is 0 if the shared expert runs elsewhere."""
    picks = rows * used
    return DecodeBuffers(floats(picks * width + rows * shared_width), Buffer((picks,), "i64"))


def shares_picks(rows: int, *, over_link: bool) -> bool:
    """Return whether a decode step of so many rows reads each distinct expert of a layer once.

    `over_link`: some of the layer's experts may be in host memory.
    """
    return rows >= (SHARED_ROWS_OVER_LINK if over_link else SHARED_ROWS)


@dataclass(frozen=True, slots=True)
class SharedPickBuffers(Buffers):
    """The buffers between the kernels of decode steps that read each distinct expert once."""

    inner: Buffer  # float32, as in DecodeBuffers
    # float32 [records, hidden]: of the picks' down matrices, then of the shared expert's.
    products: Buffer


def shared_pick_buffers(
    rows: int, used: int, shape: ExpertShape, shared_width: int
) -> SharedPickBuffers:
    """Return those buffers; `shared_width` is 0 if the shared expert runs elsewhere."""
    width, hidden = shape
    picks = rows * used
    records = picks * steps_of(width, RECORD_COLUMNS)
    records += rows * steps_of(shared_width, RECORD_COLUMNS)
    return SharedPickBuffers(floats(picks * width + rows * shared_width), floats(records, hidden))


def chosen_weights(rows: int, used: int) -> Buffer:
    """Return the weights that `choose_few_rows` writes; ids stay in registers."""
    return floats(rows, used)


def does_top_k(rows: int) -> bool:
    """Return whether the experts' first kernel does the top-k of a decode step of so many rows."""
    return rows <= CHOSEN_ROWS


def runs_with_routed(width: int) -> bool:
    """Return whether decode kernels of routed experts also run a shared expert of this width.

    Its weights must be in tiles, too.
    """
    return width % EXPERT_STEP == 0


def experts_at_once(count: int, shape: ExpertShape, most_bytes: int) -> int:
    """Return the number of experts in a group, whose gates and ups are unpacked at a time."""
    fitting = max(1, most_bytes // (2 * 2 * shape.width * shape.hidden))
    return -(-count // -(-count // fitting))


@dataclass(frozen=True, slots=True)
class GroupBuffers(Buffers):
    """A group of experts unpacked to 16 bits, and the rows of its picks."""

    gates_and_ups: Buffer  # [experts, 2 * width, hidden]; downs overwrite it
    rows: Buffer  # [picks, hidden]
    inner: Buffer  # [picks, width]: values between up and down
    powers: Buffer | None  # float32 [picks] for f16: what each inner row was divided by


def group_buffers(experts: int, shape: ExpertShape, picks: int, dtype: str) -> GroupBuffers:
    """Return the buffers of a group of experts."""
    width, hidden = shape
    return GroupBuffers(
        Buffer((experts, 2 * width, hidden), dtype),
        Buffer((picks, hidden), dtype),
        Buffer((picks, width), dtype),
        floats(picks) if dtype == "f16" else None,
    )


def count_groups(
    count: ScratchCount,
    experts: int,
    shape: ExpertShape,
    picks: int,
    dtype: str,
    unpack_bytes: int,
) -> None:
    """Count `sum_groups`: one group of experts after another."""
    each = experts_at_once(experts, shape, unpack_bytes)
    groups = [min(each, experts - first) for first in range(0, experts, each)]
    for group in count.largest(groups):
        with count.frame():
            count.take(group_buffers(group, shape, picks, dtype))


def sorted_rows(experts: int, used: int) -> int:
    """Return the most rows of a step that are multiplied with packed tiles."""
    return SORTED_PICKS * experts // used


def sorted_groups(picks: int, experts: int, rows: int = GROUP_ROWS) -> int:
    """Return the most groups of `rows` picks that there can be, however picks spread over experts.

    An expert's first group is found from the number of picks before it and the number of experts
    before it, each of which may have one group that is not full. So sorted_rows.cu needs no count
    of each other expert's picks.
    """
    return picks // rows + experts


@dataclass(frozen=True, slots=True)
class PackedBuffers(Buffers):
    """Picks sorted by expert, and their values between up and down."""

    order: Buffer  # int32 [8 * groups]: the pick at each place, -1: none
    tiles: Buffer  # int64 [tiles, ROW_TILE_WORDS], see sorted.cuh
    inner: Buffer  # f16 pieces, which down reads


@dataclass(frozen=True, slots=True)
class PackedInputs(Buffers):
    """The buffers that gates and ups read and write; free before down runs."""

    rows: Buffer  # f16 pieces of the sorted rows
    inner: Buffer  # float32 [places, width]


def packed_buffers(picks: int, experts: int, width: int) -> PackedBuffers:
    """Return the buffers that a step with packed tiles holds until its end."""
    places = GROUP_ROWS * sorted_groups(picks, experts)
    tiles = sorted_groups(picks, experts, TILE_PICKS)
    return PackedBuffers(
        Buffer((places,), "i32"), Buffer((tiles, ROW_TILE_WORDS), "i64"), half_rows(places, width)
    )


def packed_inputs(picks: int, experts: int, width: int, hidden: int) -> PackedInputs:
    """Return the buffers of gates and ups in a step with packed tiles."""
    places = GROUP_ROWS * sorted_groups(picks, experts)
    return PackedInputs(half_rows(places, hidden), floats(places, width))


def packed_answers(picks: int, hidden: int) -> Buffer:
    """Return the buffer of every pick's output."""
    return floats(picks, hidden)


def count_packed(count: ScratchCount, experts: int, shape: ExpertShape, picks: int) -> None:
    """Count `sum_experts`: rows sorted by expert, multiplied with packed tiles."""
    width, hidden = shape
    with count.frame():
        count.take(packed_buffers(picks, experts, width))
        with count.frame():
            count.take(packed_inputs(picks, experts, width, hidden))
        count.take(packed_answers(picks, hidden))
