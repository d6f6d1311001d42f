"""Scratch of routed experts: on the decode path, and on both prefill paths (packed, unpacked)."""

from dataclasses import dataclass

from headroom.kernels.cuda.buffers import Buffer, Buffers, ScratchCount, floats
from headroom.kernels.cuda.matmul_scratch import half_rows
from headroom.kernels.cuda.sizes import GROUP_ROWS

# Up to so many picks an expert, on average, its packed tiles are multiplied as they lie; 0: never.
# They are taken apart anew for every 32 rows: for more rows it costs less to unpack an expert once
# and to leave the products to the fastest there are. Measured 2026-11-15 on an H200, 256 experts of
# 512 x 2048 in Q4_K and Q6_K: with 64 picks 1.0 ms a layer, unpacked 1.3; with 128 they are 1.8.
SORTED_PICKS = 64
TILE_PICKS = 32  # most of an expert's rows that are multiplied at once, see sorted.cu
ROW_TILE_WORDS = 4  # int64, of a tile of such rows: where its matrices are, which rows meet them
CHOSEN_ROWS = 2  # most rows of a step whose experts `gate_up` chooses itself, see experts.cu


@dataclass(frozen=True, slots=True)
class DecodeBuffers(Buffers):
    """What lies between the two kernels of the decode path."""

    inner: Buffer  # float32: values between up and down of all picks, then of the shared expert
    downs: Buffer  # int64 [picks]: the address of each pick's down matrix


def decode_buffers(rows: int, used: int, width: int, shared_width: int) -> DecodeBuffers:
    """Return the buffers of few rows; `shared_width` is 0 if the shared expert runs by itself."""
    picks = rows * used
    return DecodeBuffers(floats(picks * width + rows * shared_width), Buffer((picks,), "i64"))


def chosen_weights(rows: int, used: int) -> Buffer:
    """Return the weights that `choose_few_rows` writes; ids stay in registers."""
    return floats(rows, used)


def experts_at_once(count: int, width: int, hidden: int, most_bytes: int) -> int:
    """Return how many experts' gates and ups are unpacked at a time, in groups of one size."""
    fitting = max(1, most_bytes // (2 * 2 * width * hidden))
    return -(-count // -(-count // fitting))


@dataclass(frozen=True, slots=True)
class GroupBuffers(Buffers):
    """A group of experts unpacked to 16 bits, and the picks of all rows among them."""

    gates_and_ups: Buffer  # [experts, 2 * width, hidden]; downs come to the same memory
    rows: Buffer  # [picks, hidden]
    inner: Buffer  # [picks, width]: values between up and down
    powers: Buffer | None  # float32 [picks] for f16: what each inner row was divided by


def group_buffers(experts: int, sizes: tuple[int, int], picks: int, dtype: str) -> GroupBuffers:
    """Return the buffers of a group whose experts have the sizes (width, hidden)."""
    width, hidden = sizes
    return GroupBuffers(
        Buffer((experts, 2 * width, hidden), dtype),
        Buffer((picks, hidden), dtype),
        Buffer((picks, width), dtype),
        floats(picks) if dtype == "f16" else None,
    )


def count_groups(
    count: ScratchCount,
    experts: int,
    sizes: tuple[int, int],
    picks: int,
    dtype: str,
    unpack_bytes: int,
) -> None:
    """Count `sum_groups`: one group of experts after another."""
    each = experts_at_once(experts, *sizes, unpack_bytes)
    groups = [min(each, experts - first) for first in range(0, experts, each)]
    for group in count.largest(groups):
        with count.frame():
            count.take(group_buffers(group, sizes, picks, dtype))


def sorted_rows(experts: int, used: int) -> int:
    """Return the most rows of a step that are multiplied with packed tiles."""
    return SORTED_PICKS * experts // used


def sorted_groups(picks: int, experts: int, rows: int = GROUP_ROWS) -> int:
    """Return how many groups of `rows` picks have room for, however they spread over experts.

    An expert's groups begin where those that end before it are counted full, and one more for each:
    sorted_rows.cu finds them without knowing how many picks other experts have one by one.
    """
    return picks // rows + experts


@dataclass(frozen=True, slots=True)
class PackedBuffers(Buffers):
    """Picks sorted by expert, and what lies between up and down."""

    order: Buffer  # int32 [8 * groups]: the pick at each place, -1: none
    tiles: Buffer  # int64 [tiles, ROW_TILE_WORDS], see sorted.cuh
    inner: Buffer  # f16 pieces, which down reads


@dataclass(frozen=True, slots=True)
class PackedInputs(Buffers):
    """What gates and ups read and write; free before down runs."""

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
    """Return the buffer of every pick's answer."""
    return floats(picks, hidden)


def count_packed(count: ScratchCount, experts: int, sizes: tuple[int, int], picks: int) -> None:
    """Count `sum_experts`: rows sorted by expert, multiplied with packed tiles."""
    width, hidden = sizes
    with count.frame():
        count.take(packed_buffers(picks, experts, width))
        with count.frame():
            count.take(packed_inputs(picks, experts, width, hidden))
        count.take(packed_answers(picks, hidden))
