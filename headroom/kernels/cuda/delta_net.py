"""Gated linear attention on a GPU: row after row for few rows, in chunks for many."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from headroom.kernels.cuda import scratch
from headroom.kernels.cuda.buffers import floats
from headroom.kernels.cuda.compile import compile_kernel, properties_of, shared_bytes_of
from headroom.kernels.cuda.delta_net_scratch import (
    CHUNK,
    DIM,
    answers,
    chunk_buffers,
    convolved,
)
from headroom.kernels.ops import DeltaNetWeights, RecurrentState, Span


class SequenceTables(Protocol):
    """The int32 tables of a step, on the device, that kernels with a recurrent state read."""

    @property
    def sequence(self) -> torch.Tensor:
        """Each row's sequence within the step; -1 for padding."""

    @property
    def index(self) -> torch.Tensor:
        """Each row's position in its sequence."""

    @property
    def starts(self) -> torch.Tensor:
        """The number of tokens that each sequence had before the step."""

    @property
    def state_slots(self) -> torch.Tensor:
        """The state slot of each sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTables:
    """The spans of a step, and their chunks; a span's first chunk begins with its first row."""

    spans: tuple[Span, ...]  # read by the host without waiting for the device
    sequence: torch.Tensor  # [rows]
    index: torch.Tensor  # [rows]
    starts: torch.Tensor  # [sequences]
    state_slots: torch.Tensor  # [sequences]
    chunk_ends: torch.Tensor  # [sequences]: the chunk after a sequence's last
    first_rows: torch.Tensor  # [chunks]
    counts: torch.Tensor  # [chunks]: rows, CHUNK but for a span's last


def span_tables(spans: tuple[Span, ...], rows: int, device: torch.device) -> SpanTables:
    """Return the tables of a step of `rows` rows, brought to the device in one copy."""
    sequence, index = [-1] * rows, [0] * rows
    chunk_ends: list[int] = []
    first_rows: list[int] = []
    counts: list[int] = []
    for number, span in enumerate(spans):
        own = slice(span.first_row, span.first_row + span.rows)
        sequence[own] = [number] * span.rows
        index[own] = range(span.start, span.start + span.rows)
        for row in range(0, span.rows, CHUNK):
            first_rows.append(span.first_row + row)
            counts.append(min(CHUNK, span.rows - row))
        chunk_ends.append(len(first_rows))
    starts = [span.start for span in spans]
    state_slots = [span.state_slot for span in spans]
    parts = (sequence, index, starts, state_slots, chunk_ends, first_rows, counts)
    joined = torch.tensor([number for part in parts for number in part], dtype=torch.int32)
    if device.type != "cpu":  # a copy from pinned memory does not wait
        joined = joined.pin_memory().to(device, non_blocking=True)
    return SpanTables(spans, *torch.split(joined, [len(part) for part in parts]))


CONVOLVED_ROWS = 16  # rows of a head that one warp convolves in prefill
# Macros that delta_net.cu needs, although its norm kernels do not depend on them.
NORM_CONSTANTS = {"HEADS": 1, "KEY_HEADS": 1, "TILED": 0, "TAPS": 4, "COLUMNS": 16}


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """How the kernels for chunks divide their work, within the shared memory of a block."""

    columns: int  # value columns of a head that a block of `run_chunks` computes: 32 or 64
    held: int  # channels of keys and queries in shared memory: all, or one half at a time

    @property
    def prepare_bytes(self) -> int:
        """Shared memory of a block of `prepare_chunks`."""
        factors = CHUNK * CHUNK if self.held == DIM else 0  # else they overwrite the queries
        return 4 * (2 * _padded(self.held) + factors + 2 * CHUNK)

    @property
    def run_bytes(self) -> int:
        """Shared memory of a block of `run_chunks`."""
        kept = (DIM + CHUNK) * self.columns + 2 * CHUNK
        # With half rows, one half of keys and scores overwrites the other.
        keys_and_scores = _padded(DIM) + _padded(CHUNK) if self.held == DIM else 0
        return 4 * (kept + 2 * _padded(self.held) + keys_and_scores)


def blocks_for(states: int, processors: int, shared_bytes: int) -> ChunkBlocks:
    """Return how `states` states are divided into blocks on a GPU of `processors` multiprocessors.

    A block has 32 columns if all blocks then run at once, or if 64 do not fit into shared memory.
    """
    wide = states * 4 > processors and ChunkBlocks(64, DIM // 2).run_bytes <= shared_bytes
    whole = ChunkBlocks(64 if wide else 32, DIM)
    return whole if whole.run_bytes <= shared_bytes else replace(whole, held=DIM // 2)


def _padded(width: int) -> int:
    """Return the floats of a chunk's rows in shared memory, padded against bank conflicts."""
    return CHUNK * (width + 4)


class DeltaNetRows(NamedTuple):
    """The inputs of a step's rows, before their activations; see `ops.DeltaNetOp`."""

    qkv: torch.Tensor  # [rows, channels]
    beta: torch.Tensor  # [rows, value heads]
    alpha: torch.Tensor  # [rows, value heads]


@dataclass(frozen=True, slots=True, eq=False)
class _Convolved:
    """What the convolution of a step's rows gives."""

    mixed: torch.Tensor  # [rows, channels]: queries, keys, values
    gates: torch.Tensor  # [rows, value heads, 2]: logarithm of the decay, strength


def step(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SequenceTables,
    columns: int = 0,
) -> torch.Tensor:
    """Return the output `[rows, value heads, dim]` for a few rows, computed row after row.

    Rows of a sequence are adjacent. A block computes `columns` columns of a head; 0: the number is
    chosen here.
    """
    qkv = rows.qkv
    heads, sequences = len(weights.decay), len(tables.starts)
    columns = columns or _columns_of_step(heads * sequences, qkv.device)
    constants = _constants(weights) | {"COLUMNS": columns}
    inputs = _convolve(rows, weights, state, tables, constants)
    out = scratch.take(answers(len(qkv), heads), qkv.device)
    compile_kernel("delta_net.cu", "recur", constants)(
        (heads, DIM // columns, sequences),
        (columns * 8, 1, 1),
        (
            *(qkv, inputs.mixed, inputs.gates, state.memory, state.inputs),
            *(tables.sequence, tables.starts, tables.state_slots, out, len(qkv)),
        ),
        early=True,
    )
    return out


def prefill(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SpanTables,
    blocks: ChunkBlocks | None = None,
) -> torch.Tensor:
    """Return the output `[rows, value heads, dim]` for many rows, computed chunk after chunk.

    `blocks` divides the work; None: it is chosen here.
    """
    qkv, device = rows[0], rows[0].device
    heads, sequences = len(weights.decay), len(tables.starts)
    blocks = blocks or blocks_for(heads * sequences, _processors(device), shared_bytes_of(device))
    constants = _constants(weights) | {"COLUMNS": blocks.columns, "HELD": blocks.held}
    out = scratch.take(answers(len(qkv), heads), device)
    with scratch.frame():
        inputs = _convolve(rows, weights, state, tables, _constants(weights))
        solved = _prepare_chunks(inputs, blocks, constants, tables)
        compile_kernel("delta_chunks.cu", "run_chunks", constants)(
            (heads, DIM // blocks.columns, sequences),
            (256, 1, 1),
            (
                *(qkv, inputs.mixed, *solved, tables.first_rows, tables.counts),
                *(tables.chunk_ends, tables.starts, tables.state_slots),
                *(state.memory, state.inputs, out, len(tables.counts)),
            ),
            blocks.run_bytes,
        )
    return out


def _prepare_chunks(
    inputs: _Convolved, blocks: ChunkBlocks, constants: dict[str, int], tables: SpanTables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what does not depend on the state: solved right sides, scores, sums of gates."""
    heads, chunks, device = constants["HEADS"], len(tables.counts), inputs.mixed.device
    buffers = chunk_buffers(heads, chunks)
    solved, scores, sums = (scratch.take(buffer, device) for buffer in buffers)
    compile_kernel("delta_chunks.cu", "prepare_chunks", constants)(
        (heads, chunks, 1),
        (256, 1, 1),
        (
            *(inputs.mixed, inputs.gates, tables.first_rows, tables.counts),
            *(solved, scores, sums),
        ),
        blocks.prepare_bytes,
    )
    return solved, scores, sums


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    narrow: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps) * silu(gate)` over a last axis of 128.

    The result is float32, or is written to `narrow` in bf16, which may have another shape.
    """
    out = scratch.take(floats(*x.shape), x.device) if narrow is None else None
    heads = x.numel() // DIM
    kernel = compile_kernel("delta_net.cu", "gated_norm", NORM_CONSTANTS)
    kernel((-(-heads // 4), 1, 1), (128, 1, 1), (x, gate, weight, out, narrow, eps, heads))
    found = narrow if out is None else out
    assert found is not None
    return found


def _convolve(
    rows: DeltaNetRows,
    weights: DeltaNetWeights,
    state: RecurrentState,
    tables: SequenceTables,
    constants: dict[str, int],
) -> _Convolved:
    qkv, count, heads = rows.qkv, len(rows.qkv), len(weights.decay)
    each = 1 if count <= CHUNK else CONVOLVED_ROWS
    buffers = convolved(count, qkv.shape[1], heads)
    mixed, gates = (scratch.take(buffer, qkv.device) for buffer in buffers)
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


def _constants(weights: DeltaNetWeights) -> dict[str, int]:
    return {
        "HEADS": len(weights.decay),
        "KEY_HEADS": weights.key_heads,
        "TILED": int(weights.tiled),
        "TAPS": weights.conv.shape[1],
    }


def _processors(device: torch.device) -> int:
    return int(properties_of(device).multi_processor_count)


def _columns_of_step(states: int, device: torch.device) -> int:
    """Return the columns of a block: few, since a row's sums take less time in narrow blocks."""
    # Step of Qwen3.5-27B on an H200, ms with 16, 32, 64 and 128 columns: 16 sequences 9.90, 9.64,
    # 10.19, 9.99; 16 rows of one sequence 8.70, 8.73, 8.94, 9.50.
    return 32 if states >= 2 * _processors(device) else 16
