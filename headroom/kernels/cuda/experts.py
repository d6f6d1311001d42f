"""Routed experts on a GPU: the table of a layer's experts, and the decode path."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headroom.formats.quants import QuantType
from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.compile import compile_kernel, refuses_device, shared_bytes_of
from headroom.kernels.cuda.expert_cache import FILL_BLOCKS, Filling
from headroom.kernels.cuda.experts_scratch import (
    ExpertShape,
    chosen_weights,
    decode_buffers,
    shared_pick_buffers,
    shares_picks,
)
from headroom.kernels.cuda.launch import Argument
from headroom.kernels.cuda.matmul import HalfRows, refuses_type
from headroom.kernels.cuda.matmul_scratch import half_rows_bytes
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.cuda.sizes import (
    EXPERT_STEP,
    RECORD_COLUMNS,
    TILE_ROWS,
    TILED,
    record_bytes,
    steps_of,
    tile_bytes,
)
from headroom.kernels.ops import Case
from headroom.kernels.types import PACKED

EXPERT_MATRICES = 3  # matrices of an expert: gate, up, down
Kinds = tuple[QuantType, ...]  # their types


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """One layer's experts in tiles, given by the addresses of their matrices."""

    addresses: torch.Tensor  # int64 [experts, EXPERT_MATRICES], on the GPU
    kinds: Kinds
    width: int  # rows of an expert's gate and up matrices
    hidden: int
    nbytes: int
    memory: tuple[torch.Tensor, ...]  # keeps the memory alive that the addresses point into
    # Between which memories decode steps fill slots; None: experts stay where they are.
    filling: Filling | None = None

    @property
    def over_link(self) -> bool:
        """Whether some of the experts may be in host memory."""
        return self.filling is not None or not all(memory.is_cuda for memory in self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpertTiles:
    """The shared expert, which every row visits, in tiles on the GPU."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    kinds: Kinds
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Addends:
    """What is added to the weighted sum of a row's routed experts, by the kernel that sums them."""

    residual: torch.Tensor | None = None  # [rows, hidden]
    shared_out: torch.Tensor | None = None  # [rows, hidden]: output of the shared expert
    shared_logits: torch.Tensor | None = None  # [rows, n]: the first of a row weighs the output
    # Decode path only: the shared expert itself, if the kernels of the routed ones run it, too.
    shared_tiles: SharedExpertTiles | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The last arguments of the kernels that sum, without the output."""
        stride = 0 if self.shared_logits is None else self.shared_logits.stride(0)
        return self.residual, self.shared_out, self.shared_logits, stride


NO_ADDENDS = Addends()


def expert_constants(table: ExpertTiles, activation: str, addends: Addends) -> dict[str, int]:
    """Return the macros of experts.cu: types of matrices and the activation."""
    kinds = [kind.ggml_id for kind in table.kinds]
    tiles = addends.shared_tiles
    shared = kinds if tiles is None else [kind.ggml_id for kind in tiles.kinds]
    return {
        **dict(zip(("GATE", "UP", "DOWN"), kinds, strict=True)),
        **dict(zip(("SHARED_GATE", "SHARED_UP", "SHARED_DOWN"), shared, strict=True)),
        "GELU": int(activation == "gelu"),
    }


def refuses(case: Case) -> str | None:
    """Return why a case cannot run here; None if it can."""
    if reason := refuses_device(case):
        return reason
    if strange := [str(kind) for kind in case.experts if kind not in TILED]:
        return f"{strange[0]} is not a type of the tensor cores"
    return refuses_type(case.dtype)


def refuses_sizes(width: int, hidden: int) -> str | None:
    """Return why experts of these sizes cannot run here; None if they can."""
    if width % EXPERT_STEP or hidden % EXPERT_STEP:
        return f"matrices of {width} x {hidden} are not multiples of {EXPERT_STEP}"
    return None


def table_of(
    pieces: Sequence[torch.Tensor], kinds: tuple[QuantType, ...], width: int, hidden: int
) -> ExpertTiles:
    """Return the table of experts whose gates, ups and downs lie in `pieces [experts, bytes]`."""
    first = torch.tensor([piece.data_ptr() for piece in pieces])
    apart = torch.tensor([piece.shape[1] for piece in pieces])
    where = first + apart * torch.arange(len(pieces[0]))[:, None]
    nbytes = sum(piece.nbytes for piece in pieces)
    addresses = where.to(pieces[0].device)
    return ExpertTiles(addresses, kinds, width, hidden, nbytes, tuple(pieces))


GATE_UP_WARPS = 8  # warps of a block of `gate_up`
# Steps of at most so many rows leave the GPU idle between kernels. `down` then prefetches its
# weights while `gate_up` still runs, and its blocks have a warp for each record.
AHEAD_ROWS = 2
DOWN_WARPS, AHEAD_DOWN_WARPS = 10, 20  # most warps of a `down` block, in larger and in such steps
PIECE_BYTES = half_rows_bytes(1, RECORD_COLUMNS)
SHARED_WARPS = 8  # warps of the blocks of shared_picks.cu
SHARED_DOWN_TILES = 16  # tiles of a down matrix that one of its blocks multiplies
# Bytes of shared memory that every GPU allows a block, and those that a block of `gate_up` takes
# beside its ring, in experts.cu and for each group of rows in shared_picks.cu.
SURE_BYTES, OTHER_BYTES, GROUP_BYTES = 48 << 10, 2 << 10, 5 << 10
Inner = tuple[torch.Tensor, torch.Tensor]


def few_rows(
    x: HalfRows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: ExpertTiles,
    activation: str,
    addends: Addends = NO_ADDENDS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's routed experts, for rows in f16.

    Picks with a negative id are skipped. `out` may be the residual itself. If the layer has a
    cache, the step's picks were resolved before, and their fills are copied here.
    """
    constants = expert_constants(table, activation, addends)
    if shares_picks(x.rows, over_link=table.over_link):
        return _SharedLaunches(x, ids, weights, table, addends, constants).run(out)
    layer = _DecodeLaunches(x, ids.shape[1], table, addends, constants)
    inner = layer.inner()
    if table.filling is None:
        kernel = compile_kernel("experts.cu", "gate_up", layer.defines)
    else:
        kernel = compile_kernel("experts.cu", "fill_gate_up", layer.defines)
    kernel(*layer.gate_up((ids,), inner), early=True)
    return layer.down(weights, inner, out)


def choose_few_rows(
    x: HalfRows,
    choice: RouterLogits,
    table: ExpertTiles,
    activation: str,
    addends: Addends = NO_ADDENDS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's routed experts; the kernel does the top-k itself.

    It takes at most `CHOSEN_ROWS` rows, since each of its warps repeats the top-k.
    """
    constants = expert_constants(table, activation, addends) | choice.constants
    rule = choice.rule
    layer = _DecodeLaunches(x, rule.used, table, addends, constants)
    weights = scratch.take(chosen_weights(x.rows, rule.used), x.pieces.device)
    args = (
        *(choice.logits, choice.bias, choice.sequence, weights, choice.counts),
        *(choice.logits.stride(0), int(rule.normalise), float(rule.scale), float(rule.softcap)),
    )
    inner = layer.inner()
    kernel = compile_kernel("experts.cu", "choose_gate_up", layer.defines)
    kernel(*layer.gate_up(args, inner), early=True)
    return layer.down(weights, inner, out)


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeLaunches:
    """The launches of one layer's experts for a step's rows."""

    x: HalfRows
    used: int
    table: ExpertTiles
    addends: Addends
    constants: dict[str, int]

    def inner(self) -> Inner:
        """Return memory for the picks' values between up and down, and for addresses of downs."""
        device = self.x.pieces.device
        buffers = decode_buffers(self.x.rows, self.used, self.table.width, self._shared_width)
        return scratch.take(buffers.inner, device), scratch.take(buffers.downs, device)

    def gate_up(
        self, args: tuple[Argument, ...], inner: Inner
    ) -> tuple[tuple[int, int], tuple[int], tuple[Argument, ...], int]:
        """Return the launch of gates and ups: grid, block, arguments, bytes of shared memory."""
        x, table, rows, used = self.x, self.table, self.x.rows, self.used
        shared = self.addends.shared_tiles
        tiles = steps_of(max(table.width, self._shared_width), TILE_ROWS)
        args = (
            *(*args, table.addresses, x.pieces, x.groups, used, rows * used, table.width),
            *(x.records, *((None, None) if shared is None else (shared.gate, shared.up))),
            *(self._shared_width, tile_bytes(table.kinds[2], table.hidden, table.width), *inner),
        )
        copying = 0
        if table.filling is not None:
            copying = steps_of(FILL_BLOCKS, tiles)
            args = (*args, *table.filling.arguments, copying)
        grid = (tiles, copying + rows * (used + (shared is not None)))
        return grid, (GATE_UP_WARPS * 32,), args, self._stages * self._stage_bytes

    def down(self, weights: torch.Tensor, inner: Inner, out: torch.Tensor | None) -> torch.Tensor:
        """Run the down products and return the weighted sums."""
        table, shared, rows, used = self.table, self.addends.shared_tiles, self.x.rows, self.used
        if out is None:
            out = torch.empty(rows, table.hidden, device=weights.device)
        records, shared_records = (
            steps_of(width, RECORD_COLUMNS) for width in (table.width, self._shared_width)
        )
        units = used * records + shared_records
        turns = steps_of(units, AHEAD_DOWN_WARPS if rows <= AHEAD_ROWS else DOWN_WARPS)
        warps = steps_of(units, turns)
        values, downs = inner
        compile_kernel("experts.cu", "down", self.defines)(
            (steps_of(table.hidden, TILE_ROWS), rows),
            (warps * 32,),
            (
                *(downs, weights, values, used, rows * used, table.width, table.hidden, records),
                *(None if shared is None else shared.down, self._shared_width, shared_records),
                *(*self.addends.arguments, out),
            ),
            units * TILE_ROWS * 4 + warps * PIECE_BYTES,
            early=True,
        )
        return out

    @property
    def _shared_width(self) -> int:
        return 0 if self.addends.shared_tiles is None else self.addends.shared_tiles.width

    @property
    def defines(self) -> dict[str, int]:
        """The macros of both kernels: equal ones, so that the source is compiled once."""
        fills = self.table.filling is not None
        in_reach = fills or not self.table.over_link
        return self.constants | {
            "LANES": self.x.lanes,
            "AHEAD": int(self.x.rows <= AHEAD_ROWS and in_reach),
            "STAGES": self._stages,
            "FILLS": int(fills),
        }

    @property
    def _stages(self) -> int:
        return _stages(self._stage_bytes, OTHER_BYTES, self.x.pieces.device)

    @property
    def _stage_bytes(self) -> int:
        return _stage_bytes(self.table, self.addends.shared_tiles)


@dataclass(frozen=True, slots=True, eq=False)
class _SharedLaunches:
    """The launches of one layer's experts that read each distinct expert once (shared_picks.cu)."""

    x: HalfRows
    ids: torch.Tensor
    weights: torch.Tensor
    table: ExpertTiles
    addends: Addends
    constants: dict[str, int]

    def run(self, out: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sums of all rows."""
        table, rows, used = self.table, self.x.rows, self.ids.shape[1]
        width, hidden, device = table.width, table.hidden, self.x.pieces.device
        shape = ExpertShape(width, hidden)
        buffers = shared_pick_buffers(rows, used, shape, self._shared_width)
        inner = scratch.take(buffers.inner, device)
        self._gate_up(inner)
        products = scratch.take(buffers.products, device)
        records, shared_records = (
            steps_of(columns, RECORD_COLUMNS) for columns in (width, self._shared_width)
        )
        compile_kernel("shared_picks.cu", "down", self._defines)(
            (
                steps_of(hidden, SHARED_DOWN_TILES * TILE_ROWS),
                self._blocks,
                max(records, shared_records),
            ),
            (SHARED_WARPS * 32,),
            (
                *(self.ids, table.addresses, self.weights, inner, rows, used, width, hidden),
                *(records, None if self._shared is None else self._shared.down),
                *(self._shared_width, shared_records, *self.addends.arguments[2:], products),
            ),
            early=True,
        )
        if out is None:
            out = torch.empty(rows, hidden, device=device)
        compile_kernel("shared_picks.cu", "sum_products", self._defines)(
            (steps_of(hidden, SHARED_WARPS * 32), rows),
            (SHARED_WARPS * 32,),
            (
                *(self.ids, products, rows, used, hidden, records, shared_records),
                *(*self.addends.arguments, out),
            ),
            early=True,
        )
        return out

    def _gate_up(self, inner: torch.Tensor) -> None:
        x, table, shared = self.x, self.table, self._shared
        tiles = steps_of(max(table.width, self._shared_width), TILE_ROWS)
        filling, copying = table.filling, 0
        fills: tuple[Argument, ...] = (None, None, None, 0, 0, 0)
        if filling is not None:
            fills, copying = filling.arguments, steps_of(FILL_BLOCKS, tiles)
        compile_kernel("shared_picks.cu", "gate_up", self._defines)(
            (tiles, copying + self._blocks),
            (SHARED_WARPS * 32,),
            (
                *(self.ids, table.addresses, x.pieces, x.groups, x.rows, self.ids.shape[1]),
                *(table.width, x.records),
                *((None, None) if shared is None else (shared.gate, shared.up)),
                *(self._shared_width, inner, *fills, copying),
            ),
            self._stages * _stage_bytes(table, shared),
            early=True,
        )

    @property
    def _shared(self) -> SharedExpertTiles | None:
        return self.addends.shared_tiles

    @property
    def _shared_width(self) -> int:
        return 0 if self._shared is None else self._shared.width

    @property
    def _blocks(self) -> int:
        """The picks of routed experts, and the one of all rows that is the shared expert."""
        return self.ids.numel() + (self._shared is not None)

    @property
    def _stages(self) -> int:
        stage = _stage_bytes(self.table, self._shared)
        return _stages(stage, self._groups * GROUP_BYTES, self.x.pieces.device)

    @property
    def _groups(self) -> int:
        """The most groups of rows of one expert: 1, 2 or 4, so that there are few variants."""
        return 1 << (self.x.groups - 1).bit_length()

    @property
    def _defines(self) -> dict[str, int]:
        """The macros of all three kernels: equal ones, so that the source is compiled once."""
        return self.constants | {
            "LANES": self.x.lanes,
            "GROUPS": self._groups,
            "STAGES": self._stages,
            "FILLS": int(self.table.filling is not None),
        }


def _stages(stage_bytes: int, other_bytes: int, device: torch.device) -> int:
    """Return the number of records that a warp of `gate_up` loads ahead."""
    size = 2 * stage_bytes
    sure = size + other_bytes <= SURE_BYTES
    return 2 if sure or size + other_bytes <= shared_bytes_of(device) else 1


def _stage_bytes(table: ExpertTiles, shared: SharedExpertTiles | None) -> int:
    """Return the bytes of one record per warp of `gate_up`; plain types need none."""
    kinds = (*table.kinds[:2], *(() if shared is None else shared.kinds[:2]))
    return GATE_UP_WARPS * max(record_bytes(kind) if kind in PACKED else 0 for kind in kinds)
