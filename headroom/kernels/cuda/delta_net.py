"""Gated linear attention on a GPU: row after row for few rows, in chunks for many."""

from dataclasses import dataclass

import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.chunks import (
    CHUNK,
    SequenceTables,
    SpanTables,
    run_plain_chunks,
)
from headroom.kernels.cuda.compile import compile_kernel, shared_bytes_of
from headroom.kernels.ops import DeltaNetWeights, RecurrentState

DIM = 128  # of keys and values; the kernels are written for it
CONVOLVED_ROWS = 16  # rows of a head that one warp takes, of many
PLAIN_HEADS = 8  # that torch's products take at a time; the planner counts the same
# What the norm kernels do not depend on, but their file does.
NORM_CONSTANTS = {"HEADS": 1, "KEY_HEADS": 1, "TILED": 0, "TAPS": 4, "COLUMNS": 16}
SHARED_FLOATS = CHUNK * (DIM + 4)  # of 64 rows of a head in shared memory


@dataclass(frozen=True, slots=True, eq=False)
class _Convolved:
    mixed: torch.Tensor  # [rows, channels]: queries, keys, values
    gates: torch.Tensor  # [rows, value heads, 2]: logarithm of the decay, strength


def step(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SequenceTables,
    columns: int = 0,
) -> torch.Tensor:
    """Return the answers `[rows, value heads, dim]` of a few rows, row after row.

    `rows` holds qkv, beta and alpha, as everywhere; rows of a sequence are adjacent. `columns` of
    a head run in one block; 0: as fits.
    """
    qkv = rows[0]
    heads, sequences = len(weights.decay), len(tables.starts)
    columns = columns or _columns_of_step(heads * sequences, qkv.device)
    constants = _constants(weights) | {"COLUMNS": columns}
    convolved = _convolve(rows, weights, state, tables, constants)
    out = scratch.empty(len(qkv), heads, DIM, device=qkv.device)
    compile_kernel("delta_net.cu", "recur", constants)(
        (heads, DIM // columns, sequences),
        (columns * 8, 1, 1),
        (
            *(qkv, convolved.mixed, convolved.gates, state.memory, state.inputs),
            *(tables.sequence, tables.starts, tables.state_slots, out, len(qkv)),
        ),
        early=True,
    )
    return out


def prefill(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SpanTables,
) -> torch.Tensor:
    """Return the answers `[rows, value heads, dim]` of many rows, chunk after chunk."""
    qkv = rows[0]
    heads, sequences = len(weights.decay), len(tables.starts)
    columns = _columns_of_prefill(heads * sequences, qkv.device)
    constants = _constants(weights) | {"COLUMNS": columns}
    out = scratch.empty(len(qkv), heads, DIM, device=qkv.device)
    with scratch.frame():
        convolved = _convolve(rows, weights, state, tables, constants)
        if 4 * _shared_floats(columns) > shared_bytes_of(qkv.device):
            _plain_prefill(qkv, convolved, weights, state, tables, out)
        else:
            _fused_prefill(qkv, convolved, constants, state, tables, out)
    return out


def _fused_prefill(
    qkv: torch.Tensor,
    convolved: _Convolved,
    constants: dict[str, int],
    state: RecurrentState,
    tables: SpanTables,
    out: torch.Tensor,
) -> None:
    heads, chunks, columns = out.shape[1], len(tables.counts), constants["COLUMNS"]
    solved = scratch.empty(heads, chunks, CHUNK, 2 * DIM, device=qkv.device)
    scores = scratch.empty(heads, chunks, CHUNK, CHUNK, device=qkv.device)
    sums = scratch.empty(heads, chunks, CHUNK, device=qkv.device)
    compile_kernel("delta_chunks.cu", "prepare_chunks", constants)(
        (heads, chunks, 1),
        (256, 1, 1),
        (
            *(convolved.mixed, convolved.gates, tables.first_rows, tables.counts),
            *(solved, scores, sums),
        ),
        4 * (2 * SHARED_FLOATS + CHUNK * CHUNK + 2 * CHUNK),
    )
    compile_kernel("delta_chunks.cu", "run_chunks", constants)(
        (heads, DIM // columns, len(tables.starts)),
        (256, 1, 1),
        (
            *(qkv, convolved.mixed, solved, scores, sums, tables.first_rows, tables.counts),
            *(tables.chunk_ends, tables.starts, tables.state_slots),
            *(state.memory, state.inputs, out, chunks),
        ),
        4 * _shared_floats(columns),
    )


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over a last axis of 128."""
    out, heads = scratch.empty(*x.shape, device=x.device), x.numel() // DIM
    kernel = compile_kernel("delta_net.cu", "gated_norm", NORM_CONSTANTS)
    kernel((-(-heads // 4), 1, 1), (128, 1, 1), (x, gate, weight, out, eps, heads))
    return out


def _convolve(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SequenceTables,
    constants: dict[str, int],
) -> _Convolved:
    qkv, count, heads = rows[0], len(rows[0]), len(weights.decay)
    each = 1 if count <= CHUNK else CONVOLVED_ROWS
    mixed = scratch.empty(*qkv.shape, device=qkv.device)
    gates = scratch.empty(count, heads, 2, device=qkv.device)
    compile_kernel("delta_net.cu", "convolve", constants | {"COLUMNS": 16})(
        (-(-(2 * weights.key_heads + heads) // 4), -(-count // each), 1),
        (128, 1, 1),
        (
            *(*rows, weights.conv, weights.decay, weights.dt_bias, state.inputs),
            *(tables.sequence, tables.index, tables.starts, tables.state_slots),
            *(mixed, gates, count, each),
        ),
        early=True,
    )
    return _Convolved(mixed, gates)


def _plain_prefill(
    qkv: torch.Tensor,
    convolved: _Convolved,
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SpanTables,
    out: torch.Tensor,
) -> None:
    """The chunks by torch's products, for devices whose blocks have too little shared memory.

    Some heads at a time: what torch allocates on the way is many times their rows.
    """
    heads, key_heads = len(weights.decay), weights.key_heads
    head = torch.arange(heads, device=qkv.device)
    source = head % key_heads if weights.tiled else head // (heads // key_heads)
    mixed = convolved.mixed.view(len(qkv), -1, DIM)
    queries, keys, values = torch.split(mixed, [key_heads, key_heads, heads], 1)
    out.zero_()
    for span in tables.spans:
        own = slice(span.first_row, span.first_row + span.rows)
        memory, inputs = state.memory[span.slot], state.inputs[span.slot]
        if span.start == 0:
            memory.zero_()
            inputs.zero_()
        for at in range(0, heads, PLAIN_HEADS):
            some = slice(at, at + PLAIN_HEADS)
            parts = (queries[own, source[some]], keys[own, source[some]], values[own, some])
            gates = convolved.gates[own, some]
            out[own, some] = run_plain_chunks(parts, gates, memory[some])
        inputs.copy_(torch.cat((inputs, qkv[own][-len(inputs) :]))[-len(inputs) :])


def _constants(weights: DeltaNetWeights) -> dict[str, int]:
    return {
        "HEADS": len(weights.decay),
        "KEY_HEADS": weights.key_heads,
        "TILED": int(weights.tiled),
        "TAPS": weights.conv.shape[1],
    }


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _columns_of_step(states: int, device: torch.device) -> int:
    """A whole state to a block where there are enough of them, else a part, to use the chip."""
    return DIM if states >= 2 * _processors(device) else 16


def _columns_of_prefill(states: int, device: torch.device) -> int:
    """Fewer to a block where all blocks then still run at once, or where no more fit."""
    fits = 4 * _shared_floats(64) <= shared_bytes_of(device)
    return 64 if fits and states * 4 > _processors(device) else 32


def _shared_floats(columns: int) -> int:
    """Floats of shared memory that a block of `run_chunks` takes."""
    rows = 3 * SHARED_FLOATS + CHUNK * (CHUNK + 4) + 2 * CHUNK
    return (DIM + CHUNK) * columns + rows
