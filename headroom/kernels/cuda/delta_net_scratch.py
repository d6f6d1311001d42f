"""Scratch of gated linear attention: convolved inputs, and intermediate values of chunks."""

from dataclasses import dataclass

from headroom.kernels.cuda.buffers import Buffer, Buffers, ScratchCount, floats

CHUNK = 64  # rows whose products run at once; the kernels are written for it
DIM = 128  # values of a key or value head; the kernels are written for it


@dataclass(frozen=True, slots=True)
class ConvolvedBuffers(Buffers):
    """The output of the convolution, which the recurrence reads."""

    mixed: Buffer  # [rows, channels]: queries, keys, values
    gates: Buffer  # [rows, heads, 2]: logarithm of the decay, strength


def convolved(rows: int, channels: int, heads: int) -> ConvolvedBuffers:
    """Return the buffers of the convolution; `heads` counts value heads, here and below."""
    return ConvolvedBuffers(floats(rows, channels), floats(rows, heads, 2))


def answers(rows: int, heads: int) -> Buffer:
    """Return the buffer of the recurrence's output."""
    return floats(rows, heads, DIM)


@dataclass(frozen=True, slots=True)
class ChunkBuffers(Buffers):
    """The values of each chunk that do not depend on the state."""

    solved: Buffer  # [heads, chunks, CHUNK, 2 * DIM]
    scores: Buffer  # [heads, chunks, CHUNK, CHUNK]
    sums: Buffer  # [heads, chunks, CHUNK]: running sums of the logarithms of decays


def chunk_buffers(heads: int, chunks: int) -> ChunkBuffers:
    """Return the buffers of all chunks of a step."""
    return ChunkBuffers(
        floats(heads, chunks, CHUNK, 2 * DIM),
        floats(heads, chunks, CHUNK, CHUNK),
        floats(heads, chunks, CHUNK),
    )


def count_step(count: ScratchCount, rows: int, channels: int, heads: int) -> None:
    """Count `step`: few rows, one after another."""
    count.take(convolved(rows, channels, heads), answers(rows, heads))


def count_prefill(count: ScratchCount, rows: int, channels: int, heads: int, chunks: int) -> None:
    """Count `prefill`: many rows in chunks."""
    count.take(answers(rows, heads))
    with count.frame():
        count.take(convolved(rows, channels, heads), chunk_buffers(heads, chunks))
