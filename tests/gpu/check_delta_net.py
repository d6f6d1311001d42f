"""Compares gated linear attention of a GPU with the plain one, and times it with --bench."""

import sys
import traceback
from dataclasses import dataclass
from functools import partial

import torch

from headroom.kernels.cuda import delta_net as fast
from headroom.kernels.cuda.delta_net import ChunkBlocks, DeltaNetRows, SpanTables, span_tables
from headroom.kernels.cuda.matmul import normed_head_rows
from headroom.kernels.ops import DeltaNetWeights, RecurrentState, Span
from headroom.kernels.reference import delta_net as plain
from tests.gpu.kept import keep_code
from tests.gpu.timing import time_us

DEVICE = "cuda"
DIM = 128
NO_PAGES = torch.zeros(0, dtype=torch.int64)
# All sizes that a GPU with much shared memory can run; other GPUs run those that fit.
BLOCKS = tuple(ChunkBlocks(columns, held) for held in (DIM, DIM // 2) for columns in (64, 32))
SMALL = BLOCKS[-1]  # which every GPU can run


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's heads."""

    heads: int
    key_heads: int
    tiled: bool

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * DIM


def make_weights(shape: Shape) -> DeltaNetWeights:
    """Random weights with decays between slow and fast."""
    return DeltaNetWeights(
        conv=torch.randn(shape.channels, 4) * 0.5,
        decay=-torch.rand(shape.heads) * 2 - 0.01,
        dt_bias=torch.randn(shape.heads),
        key_heads=shape.key_heads,
        tiled=shape.tiled,
    )


def make_state(shape: Shape, slots: int) -> RecurrentState:
    """Random states: a fresh sequence must not see them."""
    return RecurrentState(
        torch.randn(slots, shape.heads, DIM, DIM) * 0.1,
        torch.randn(slots, 3, shape.channels),
    )


def make_rows(shape: Shape, rows: int) -> DeltaNetRows:
    """Return random inputs."""
    return DeltaNetRows(
        torch.randn(rows, shape.channels),
        torch.randn(rows, shape.heads),
        torch.randn(rows, shape.heads),
    )


def to_device(weights: DeltaNetWeights) -> DeltaNetWeights:
    """Return a copy of the weights on the GPU."""
    return DeltaNetWeights(
        weights.conv.to(DEVICE),
        weights.decay.to(DEVICE),
        weights.dt_bias.to(DEVICE),
        weights.key_heads,
        weights.tiled,
    )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative distance; not a number counts as one."""
    found, wanted = found.cpu().double(), wanted.double()
    distance = float((found - wanted).norm() / wanted.norm())
    return distance if distance == distance else float("inf")


def fitting_blocks() -> tuple[ChunkBlocks, ...]:
    """The divisions of a prefill that this GPU can run."""
    room = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin
    return tuple(blocks for blocks in BLOCKS if blocks.run_bytes <= room)


def check(
    shape: Shape, spans: tuple[Span, ...], rows: int, how: int | ChunkBlocks | None = None
) -> bool:
    """One step with gaps of padding against the plain kernel, answers and states.

    `how`: the columns of a step's blocks, or the blocks of a prefill; None: a prefill as fits.
    """
    weights, state, inputs = make_weights(shape), make_state(shape, 6), make_rows(shape, rows)
    mine = RecurrentState(state.memory.to(DEVICE, copy=True), state.inputs.to(DEVICE, copy=True))
    wanted = plain.delta_net(*inputs, weights, state, spans)
    own = torch.zeros(rows, dtype=torch.bool)
    for span in spans:
        own[span.first_row : span.first_row + span.rows] = True
    tables = span_tables(spans, rows, torch.device(DEVICE))
    packed = DeltaNetRows(*(x.to(DEVICE) for x in inputs))
    gate, norm = torch.randn(rows, shape.heads, DIM), torch.randn(DIM)
    if isinstance(how, int):
        found = fast.step(packed, to_device(weights), mine, tables, how)
    else:
        found = fast.prefill(packed, to_device(weights), mine, tables, how)
    wanted = plain.gated_norm(wanted, gate, norm, 1e-6)
    found = fast.gated_norm(found, gate.to(DEVICE), norm.to(DEVICE), 1e-6)
    errors = (
        error(found.cpu()[own], wanted[own]),
        error(mine.memory, state.memory),
        error(mine.inputs, state.inputs),
    )
    good = max(errors) < 2e-5 and torch.equal(mine.inputs.cpu(), state.inputs)
    text = " ".join(f"{e:.1e}" for e in errors)
    lengths = [(span.start, span.rows) for span in spans]
    print(f"{'PASS' if good else 'FAIL'} {how} {shape} {lengths}: {text}", flush=True)
    return good


def check_columns(shape: Shape, spans: tuple[Span, ...], rows: int) -> bool:
    """A step has the same bits however many columns its blocks have, which follows from others."""
    weights, state, inputs = make_weights(shape), make_state(shape, 6), make_rows(shape, rows)
    tables = span_tables(spans, rows, torch.device(DEVICE))
    packed, own = DeltaNetRows(*(x.to(DEVICE) for x in inputs)), torch.zeros(rows, dtype=torch.bool)
    for span in spans:
        own[span.first_row : span.first_row + span.rows] = True
    found = []
    for columns in (16, 32):
        mine = RecurrentState(
            state.memory.to(DEVICE, copy=True), state.inputs.to(DEVICE, copy=True)
        )
        answers = fast.step(packed, to_device(weights), mine, tables, columns).cpu()[own]
        found.append((answers.clone(), mine.memory.cpu()))
    good = all(
        torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True)
    )
    print(f"{'PASS' if good else 'FAIL'} {shape} the same bits by 16 and 32 columns", flush=True)
    return good


def check_blocks(shape: Shape, spans: tuple[Span, ...], rows: int) -> bool:
    """A prefill has the same bits however it is divided, and whatever else is in the step."""
    weights, state = to_device(make_weights(shape)), make_state(shape, 6)
    inputs = DeltaNetRows(*(x.to(DEVICE) for x in make_rows(shape, rows)))
    wanted, good = None, True
    for blocks in (None, *fitting_blocks()):
        for some in (spans, spans[:1]):
            mine = RecurrentState(
                state.memory.to(DEVICE, copy=True), state.inputs.to(DEVICE, copy=True)
            )
            tables = span_tables(some, rows, torch.device(DEVICE))
            answers = fast.prefill(inputs, weights, mine, tables, blocks)
            first = slice(some[0].first_row, some[0].first_row + some[0].rows)
            found = (answers[first], mine.memory[some[0].state_slot])
            wanted = wanted or found
            good = good and all(map(torch.equal, found, wanted))
    print("PASS" if good else "FAIL", "bits of", len(fitting_blocks()), "divisions", shape)
    return good


def span(first: int, rows: int, start: int, slot: int) -> Span:
    """A span without pages."""
    return Span(first, rows, start, NO_PAGES, slot)


SHAPES = (
    Shape(4, 2, False),
    Shape(6, 2, True),
    Shape(48, 16, False),
    Shape(32, 16, True),
)
PREFILLS = (
    ((span(0, 64, 0, 1),), 64),
    ((span(0, 150, 3, 1),), 150),
    ((span(0, 65, 0, 3), span(65, 17, 100, 0), span(90, 2, 0, 5)), 96),
    ((span(0, 700, 0, 1), span(700, 324, 64, 2)), 1024),
)


def cases() -> list[tuple[object, ...]]:
    """Every kind of step."""
    found: list[tuple[object, ...]] = []
    for shape in SHAPES:
        for columns in (16, 32):
            found.append((shape, (span(0, 1, 0, 2),), 1, columns))
            found.append(
                (shape, (span(0, 1, 7, 4), span(1, 5, 2, 1), span(6, 2, 0, 0)), 10, columns)
            )
        # The plain one takes long for many rows of many heads; check_blocks has those.
        count = len(PREFILLS) - (shape.heads > 16)
        found += [(shape, *prefill, None) for prefill in PREFILLS[:count]]
        found.append((shape, *PREFILLS[2], SMALL))
    return found


def bench(name: str, shape: Shape) -> None:
    """Times of a step and of a prefill, with states that no cache holds."""
    weights, slots = to_device(make_weights(shape)), 40
    state = RecurrentState(
        torch.randn(slots, shape.heads, DIM, DIM, device=DEVICE) * 0.1,
        torch.randn(slots, 3, shape.channels, device=DEVICE),
    )
    for sequences, rows in ((1, 1), (1, 4), (1, 16), (4, 1), (8, 1)):
        for columns in (16, 32):
            bench_step(name, shape, weights, state, (sequences, rows, columns))
    for rows in (256, 2048):
        for blocks in (None, *fitting_blocks()):
            bench_prefill(name, shape, (weights, state), rows, blocks)


def bench_prefill(
    name: str,
    shape: Shape,
    layer: tuple[DeltaNetWeights, RecurrentState],
    rows: int,
    blocks: ChunkBlocks | None,
) -> None:
    """The time of a prefill of one sequence, and of its parts, by how it is divided."""
    inputs = DeltaNetRows(*(x.to(DEVICE) for x in make_rows(shape, rows)))
    table = span_tables((span(0, rows, 0, 0),), rows, torch.device(DEVICE))
    took = time_us([partial(fast.prefill, inputs, *layer, table, blocks)])
    what = f"{rows} rows, {blocks or 'as fits'}: {took:.0f} us"
    if blocks:
        constants = fast._constants(layer[0])
        convolve = partial(fast._convolve, inputs, *layer, table, constants)
        constants |= {"COLUMNS": blocks.columns, "HELD": blocks.held}
        prepare = partial(fast._prepare_chunks, convolve(), blocks, constants, table)
        what += f", {time_us([convolve]):.0f} of them convolution, {time_us([prepare]):.0f} before"
    print(f"BENCH {name} prefill {what}")


def bench_step(
    name: str,
    shape: Shape,
    weights: DeltaNetWeights,
    state: RecurrentState,
    sizes: tuple[int, int, int],
) -> None:
    """The time of a step of some sequences with some rows each, by columns of a block."""
    sequences, rows, columns = sizes
    inputs = DeltaNetRows(*(x.to(DEVICE) for x in make_rows(shape, sequences * rows)))
    gate = torch.randn(sequences * rows, shape.heads, DIM, device=DEVICE)
    weight = torch.ones(DIM, device=DEVICE)
    tables = [_tables(sequences, rows, turn * sequences % 32) for turn in range(32)]

    def layer(table: SpanTables) -> None:
        answers = fast.step(inputs, weights, state, table, columns=columns)
        normed_head_rows(answers, gate, weight, 1e-6)

    took = time_us([partial(layer, table) for table in tables])
    moved = sequences * shape.heads * DIM * DIM * 8  # each state read and written once
    speed = moved / took / 1e3
    what = f"{sequences} x {rows} rows, {columns} columns"
    print(f"BENCH {name} {what}: {took:.1f} us {speed:.0f} GB/s")


def _tables(sequences: int, rows: int, slot: int) -> SpanTables:
    spans = tuple(span(i * rows, rows, 5, slot + i) for i in range(sequences))
    return span_tables(spans, sequences * rows, torch.device(DEVICE))


def main() -> None:
    """Run every case, then the times if asked for."""
    keep_code()
    torch.manual_seed(0)
    checks = [partial(check, *case) for case in cases()]  # type: ignore[arg-type]
    for shape in SHAPES:
        checks.append(partial(check_blocks, shape, *PREFILLS[-1]))
    for one in checks:
        try:
            one()
        except Exception:
            print("FAIL", one.args)
            traceback.print_exc(limit=4)
    if "--bench" in sys.argv:
        bench("27B", Shape(48, 16, False))
        bench("35B-A3B", Shape(32, 16, False))


if __name__ == "__main__":
    main()
