"""Routed experts of short prompts: rows sorted by expert are multiplied with packed tiles.

Only the device knows how many rows an expert has; the host never waits for these numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import (
    compile_kernel,
    properties_of,
    shared_bytes_of,
)
from headroom.kernels.cuda.experts import ExpertTiles
from headroom.kernels.cuda.experts_scratch import (
    TILE_PICKS,
    packed_answers,
    packed_buffers,
    packed_inputs,
    sorted_groups,
)
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.matmul import NarrowRows
from headroom.kernels.cuda.sizes import (
    BLOCK_OVERHEAD_BYTES,
    GROUP_ROWS,
    RECORD_COLUMNS,
    TILE_ROWS,
    record_bytes,
    steps_of,
)
from headroom.kernels.ops import Picks

PACKED_SORT_THREADS = 512  # of a block of sorted_rows.cu
WANTED_WARPS = 12  # per multiprocessor: some work while others wait for their records
# Of a multiprocessor's shared memory; the rest is L1 cache, through which rows are read.
SHARED_SHARE = 0.7
WARP_RECORDS = 8  # least pairs of records of a warp, which waits once for the first pair
# (warps of a block, pairs of records that each warp loads ahead), the best first.
PACKED_SHAPES = ((8, 2), (4, 2), (8, 1), (4, 1), (2, 1), (1, 1))


@dataclass(frozen=True, slots=True)
class PackedShape:
    """How warps share a product; results and the order of sums do not depend on it."""

    warps: int  # of a block
    stages: int  # pairs of records that a warp loads ahead
    shared_bytes: int  # of a block


@cache
def packed_shape_for(
    pair: tuple[QuantType, QuantType], block_bytes: int, all_bytes: int
) -> PackedShape:
    """Return the shape of products with pairs of records of two types.

    It is the first shape with which WANTED_WARPS run at a time, given the shared memory of a block
    and of a multiprocessor, or else the one with the most running warps.
    """
    size = sum(record_bytes(kind) for kind in pair)
    shapes = [PackedShape(warps, stages, warps * stages * size) for warps, stages in PACKED_SHAPES]

    def running(shape: PackedShape) -> int:
        needed = shape.shared_bytes + BLOCK_OVERHEAD_BYTES
        fitting = int(SHARED_SHARE * all_bytes) // needed if needed <= block_bytes else 0
        return shape.warps * fitting

    return max(shapes, key=lambda shape: min(running(shape), WANTED_WARPS))


LaunchParts = tuple[Sequence[int], Sequence[int], Sequence[Argument], int]


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The picks sorted by expert, in groups of eight."""

    order: torch.Tensor  # int32 [8 * groups]: the pick at each place, -1: none
    tiles: torch.Tensor  # int64 [tiles, ROW_TILE_WORDS], see sorted.cuh
    inner: torch.Tensor  # f16 pieces: the picks' values between up and down
    groups: int
    defines: dict[str, int]  # macros of the kernels that read rows


def sum_experts(
    x: NarrowRows,
    picks: Picks,
    experts: ExpertTiles,
    activation: str,
    rest: tuple[Argument, ...],  # what is added to each row's sum (see Addends), and the output
) -> None:
    """Write the weighted sum of each row's experts, plus what `rest` adds.

    Picks with a negative id are skipped. A row's bits do not depend on the other rows.
    """
    ids, weights = picks
    assert x.values.is_contiguous()
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    (rows, used), hidden = ids.shape, experts.hidden
    down = experts.kinds[2]
    defines = {"X_F16": int(x.values.dtype == torch.float16)}
    with scratch.frame():
        places = _sort(ids, experts, defines)
        _run_gates_and_ups(x, used, experts, activation, places)
        answers = scratch.take(packed_answers(rows * used, hidden), ids.device)
        constants, launch = _product(
            ((down, down), ""),
            (places.inner, places.order, answers, hidden),
            (steps_of(hidden, 2 * TILE_ROWS), experts.width),
            places,
        )
        compile_kernel("sorted.cu", "down", constants)(*launch, early=True)
        compile_kernel("sorted_rows.cu", "sum_answers", defines)(
            (rows,), (256,), (answers, ids, weights, used, hidden, *rest), early=True
        )


def _sort(ids: torch.Tensor, experts: ExpertTiles, defines: dict[str, int]) -> _Places:
    picks, count = ids.numel(), len(experts.addresses)
    groups, tiles = (sorted_groups(picks, count, rows) for rows in (GROUP_ROWS, TILE_PICKS))
    buffers = packed_buffers(picks, count, experts.width)
    order, found, inner = (scratch.take(buffer, ids.device) for buffer in buffers)
    compile_kernel("sorted_rows.cu", "sort_picks", defines)(
        (count,),
        (PACKED_SORT_THREADS,),
        (ids, experts.addresses, order, found, picks, groups, tiles),
        early=True,
    )
    return _Places(order, found, inner, groups, defines)


def _run_gates_and_ups(
    x: NarrowRows,
    used: int,
    experts: ExpertTiles,
    activation: str,
    places: _Places,
) -> None:
    """Write the picks' values between up and down, in f16, to `places.inner`."""
    device, groups = x.values.device, places.groups
    width, hidden = experts.width, experts.hidden
    gate, up, _ = experts.kinds
    buffers = packed_inputs(len(x.values) * used, len(experts.addresses), width, hidden)
    with scratch.frame():
        gathered, inner = (scratch.take(buffer, device) for buffer in buffers)
        records = steps_of(hidden, RECORD_COLUMNS)
        compile_kernel("sorted_rows.cu", "gather_rows", places.defines)(
            (groups * records,),
            (GROUP_ROWS * 32,),
            (x.values, x.powers, places.order, gathered, used, hidden, records, groups),
            early=True,
        )
        constants, launch = _product(
            ((gate, up), activation),
            (gathered, inner, width),
            (steps_of(width, TILE_ROWS), hidden),
            places,
        )
        compile_kernel("sorted.cu", "gate_up", constants)(*launch, early=True)
        records = steps_of(width, RECORD_COLUMNS)
        compile_kernel("sorted_rows.cu", "halve_inner", places.defines)(
            (groups * records,),
            (GROUP_ROWS * 32,),
            (inner, places.order, places.inner, width, records, groups),
            early=True,
        )


def _product(
    product: tuple[tuple[QuantType, QuantType], str],  # types; activation, "" for down
    tensors: tuple[Argument, ...],
    sides: tuple[int, int],  # pairs of tiles, and columns
    places: _Places,
) -> tuple[dict[str, int], LaunchParts]:
    """Return macros and launch of a product: tiles of rows with all tile pairs of their expert."""
    (kinds, activation), (pairs, columns) = product, sides
    device, records = places.order.device, steps_of(columns, RECORD_COLUMNS)
    gpu = properties_of(device)
    shape = packed_shape_for(kinds, shared_bytes_of(device), gpu.shared_memory_per_multiprocessor)
    defines = {
        "GATED": int(activation != ""), "A_KIND": kinds[0].ggml_id, "B_KIND": kinds[1].ggml_id,
        "GELU": int(activation == "gelu"), "WARPS": shape.warps, "STAGES": shape.stages,
    }  # fmt: skip
    turns = steps_of(WARP_RECORDS, records)
    grid = (steps_of(pairs, shape.warps * turns), len(places.tiles))
    args = (places.tiles, *tensors, records, places.groups)
    return defines, (grid, (shape.warps * 32,), args, shape.shared_bytes)
