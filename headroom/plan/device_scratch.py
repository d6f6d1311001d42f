"""Scratch of a GPU's step: what its parts take from one arena, in the order of the code.

Every function here follows the one that takes the memory: layers/cuda_rows.py,
layers/cuda_block.py, experts/device_experts.py and the launchers in kernels/cuda. A test runs
those on a CPU and compares.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isqrt

from headroom.kernels.cuda.attention_scratch import (
    WIDE_ROWS,
    WIDE_SCORES,
    count_pieces,
    wide_stride,
)
from headroom.kernels.cuda.buffers import ALIGNMENT
from headroom.kernels.cuda.experts_scratch import (
    ROW_TILE_WORDS,
    TILE_PICKS,
    experts_at_once,
    sorted_groups,
    sorted_rows,
)
from headroom.kernels.cuda.matmul_scratch import half_rows_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS, GROUP_ROWS
from headroom.plan.shape import LayerShape
from headroom.units import GIB, MIB

CHUNK = 64  # rows that gated linear attention takes at once
F32, BF16, I32, I64 = 4, 2, 4, 8
NARROW_TYPES = ("bf16", "f16")  # that a GPU's fused kernels compute many rows in
UPLOAD_BYTES = 2 * 64 * MIB  # of the buffers through which weights are loaded


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What scratch depends on beside a layer."""

    hidden: int
    rows: int
    spans: int  # most sequences that have rows
    context: int
    unpack_bytes: int
    halves: bool = False  # many rows are f16: with powers of two, and answers in float32


class _Tally:
    """Counts like the arena: what was taken in a frame is free after it."""

    def __init__(self) -> None:
        self.peak = self._used = 0

    def take(self, *sizes: int) -> None:
        self._used += sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        self.peak = max(self.peak, self._used)

    @contextmanager
    def frame(self) -> Iterator[None]:
        before = self._used
        yield
        self._used = before


def unpack_bytes_for(total_bytes: int) -> int:
    """Return how many bytes of weights a GPU unpacks at a time for products of many rows.

    A 128th of its memory: 64 MiB of 8 GiB. More than the largest matrices of today is of no use.
    """
    return min(max(total_bytes // 128, 64 * MIB), GIB)


def device_phases(layers: Sequence[LayerShape], step: DeviceStep) -> dict[str, int]:
    """Return the scratch of each part of a step; they follow each other, so the largest counts."""
    parts: dict[str, Callable[[_Tally, LayerShape, DeviceStep], None]] = {}
    if any(layer.kind != "recurrent" for layer in layers):
        parts["attention"] = _attention
    if any(layer.kind == "recurrent" for layer in layers):
        parts["recurrent"] = _recurrent
    if any(not layer.experts for layer in layers):
        parts["feed-forward"] = _feed_forward
    if any(layer.experts for layer in layers):
        parts["experts"] = _experts
    phases = {name: _largest(part, layers, step) for name, part in parts.items()}
    return phases | {"loading": UPLOAD_BYTES}


def _largest(
    part: Callable[[_Tally, LayerShape, DeviceStep], None],
    layers: Sequence[LayerShape],
    step: DeviceStep,
) -> int:
    """The largest layer's peak, in the largest captured steps and in those of the most rows."""
    sizes = {DECODE_ROWS, max(step.rows, DECODE_ROWS)}
    peak = 0
    for layer in dict.fromkeys(layers):
        for rows in sizes:
            tally = _Tally()
            part(tally, layer, replace(step, rows=rows, spans=min(step.spans, rows)))
            peak = max(peak, tally.peak)
    return peak


def _rows_of(tally: _Tally, step: DeviceStep, columns: int, *, normed: bool = False) -> None:
    """Rows on their way into a product."""
    rows = step.rows
    if rows <= DECODE_ROWS:
        tally.take(half_rows_bytes(rows, columns))
        return
    tally.take(BF16 * rows * columns, *([F32 * rows] if step.halves else []))
    if normed and step.halves:  # bf16 is written at once
        with tally.frame():
            tally.take(F32 * rows * columns)


def _product(tally: _Tally, step: DeviceStep, outputs: int, columns: int) -> None:
    """What a product takes beside its output: of many rows an unpacked part and its answers."""
    fitting = max(16, step.unpack_bytes // (BF16 * columns))
    part = min(outputs, fitting)
    with tally.frame():
        if step.rows > DECODE_ROWS:
            answer = F32 if step.halves else BF16
            tally.take(answer * step.rows * part, BF16 * part * columns)
        else:
            tally.take(F32 * step.rows * columns)  # which a plain weight reads


def _attention(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    if layer.kind == "recurrent":
        return
    rows, width = step.rows, layer.query_heads * layer.key_dim
    outs = [width, *layer.kv_values, layer.gate_width]
    _rows_of(tally, step, step.hidden, normed=True)
    tally.take(*(F32 * rows * out for out in outs))
    _product(tally, step, sum(outs), step.hidden)
    tally.take(F32 * rows * width)  # queries
    if rows <= DECODE_ROWS:
        heads, pieces = layer.query_heads, count_pieces(step.context)
        tally.take(F32 * rows * heads * pieces * (layer.key_dim + 2), F32 * rows * width)
    else:
        tally.take(F32 * rows * width)
        seen = min(step.context, layer.window + rows) if layer.window else step.context
        with tally.frame():
            tally.take(*(2 * [BF16 * seen * layer.kv_heads * layer.key_dim]), BF16 * rows * width)
    _rows_of(tally, step, width)
    _answers(tally, layer, step)
    _product(tally, step, step.hidden, width)


def _answers(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    """What a part answers, where it is normed before it is added."""
    if layer.post_norms:
        tally.take(F32 * step.rows * step.hidden)


def _recurrent(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    if layer.kind != "recurrent":
        return
    rows, heads = step.rows, layer.state_heads
    dim = isqrt(layer.state_values // heads)
    inner = heads * dim
    channels = layer.mixer_width // 2 - inner
    outs = (channels, inner, heads, heads)
    _rows_of(tally, step, step.hidden, normed=True)
    tally.take(*(F32 * rows * out for out in outs))
    _product(tally, step, sum(outs), step.hidden)
    tally.take(F32 * rows * inner)  # answers
    with tally.frame():
        tally.take(F32 * rows * channels, F32 * rows * 2 * heads)
        if rows > DECODE_ROWS:
            chunks = rows // CHUNK + step.spans
            tally.take(*(F32 * heads * chunks * CHUNK * width for width in (2 * dim, CHUNK, 1)))
    if rows <= DECODE_ROWS:
        tally.take(F32 * rows * channels, F32 * rows * 2 * heads)
    _rows_of(tally, step, inner, normed=True)
    _product(tally, step, step.hidden, inner)


def _feed_forward(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    if layer.experts:
        return
    width = layer.ffn_width
    _rows_of(tally, step, step.hidden, normed=True)
    _gated(tally, step, width)
    _answers(tally, layer, step)
    _product(tally, step, step.hidden, width)


def _gated(tally: _Tally, step: DeviceStep, width: int) -> None:
    tally.take(*(2 * [F32 * step.rows * width]))
    _product(tally, step, 2 * width, step.hidden)
    _rows_of(tally, step, width)


def _experts(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    if not layer.experts:
        return
    rows, picks = step.rows, step.rows * layer.experts_used
    tally.take(F32 * rows * step.hidden)  # normed, as the router reads it
    _rows_of(tally, step, step.hidden, normed=layer.post_norms)
    tally.take(F32 * rows * (layer.experts + 1), I32 * picks, F32 * picks)
    if layer.post_norms:  # beside a dense part, whose answers come after theirs
        tally.take(F32 * rows * step.hidden)
        _routed(tally, layer, step)
        _rows_of(tally, step, step.hidden, normed=True)
        tally.take(F32 * rows * step.hidden)
    if layer.ffn_width:
        _gated(tally, step, layer.ffn_width)
        tally.take(F32 * rows * step.hidden)
        _product(tally, step, step.hidden, layer.ffn_width)
    if not layer.post_norms:
        _routed(tally, layer, step)


def _routed(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    """What the products of each row's experts take."""
    picks = step.rows * layer.experts_used
    if step.rows <= DECODE_ROWS:
        beside = 0 if layer.post_norms else layer.ffn_width  # of the expert that every row visits
        tally.take(F32 * (picks * layer.expert_width + step.rows * beside), I64 * picks)
        return
    each = experts_at_once(layer.experts, layer.expert_width, step.hidden, step.unpack_bytes)
    plain = 2 * BF16 * each * layer.expert_width * step.hidden
    with tally.frame():
        tally.take(plain, BF16 * picks * step.hidden, BF16 * picks * layer.expert_width)
        tally.take(F32 * picks if step.halves else 0)
    _sorted(tally, layer, step)


def _sorted(tally: _Tally, layer: LayerShape, step: DeviceStep) -> None:
    """What the same take in the longest step whose rows meet their experts' tiles as they lie."""
    rows = min(step.rows, sorted_rows(layer.experts, layer.experts_used))
    if rows <= DECODE_ROWS:
        return
    picks, width = rows * layer.experts_used, layer.expert_width
    groups, tiles = (sorted_groups(picks, layer.experts, each) for each in (GROUP_ROWS, TILE_PICKS))
    places = GROUP_ROWS * groups
    with tally.frame():
        tally.take(I32 * places, 8 * ROW_TILE_WORDS * tiles, half_rows_bytes(places, width))
        with tally.frame():
            tally.take(half_rows_bytes(places, step.hidden), F32 * places * width)
        tally.take(F32 * picks * step.hidden)


def library_bytes(layers: Sequence[LayerShape], step: DeviceStep, sm: int) -> int:
    """Return what torch allocates of its own beside the arena while a step runs.

    The results of its attention and of grouped products, whoever computes these, what it sorts
    picks with, rotary tables, and cuBLAS's workspace. Gated linear attention takes nothing of
    torch's.
    """
    rows, most = step.rows, 0
    if rows <= DECODE_ROWS:
        return _cublas_bytes(sm)
    for layer in dict.fromkeys(layers):
        size, picks = 0, rows * layer.experts_used
        if layer.kind != "recurrent":
            width = layer.query_heads * layer.key_dim
            size = BF16 * rows * width + F32 * rows * layer.query_heads
            size += _attention_bytes(layer, step, sm)
        answer = F32 if step.halves else BF16
        grouped = answer * picks * (2 * layer.expert_width + step.hidden) + PICK_BYTES * picks
        most = max(most, size, grouped if layer.experts else 0)
    rope = 4 * F32 * rows * max(layer.key_dim for layer in layers)
    return most + rope + _cublas_bytes(sm)


MOST_FLASH_DIM, FLASH_STEP, MASKED_ROWS = 256, 8, 512  # of kernels/cuda/prefill.py
FLASH_SM = 80
MOST_KEPT_DIM = 128  # wider heads are summed in memory by torch's memory-efficient kernel
MASK_BYTES = 8  # of a row and a key while a mask is made and made ready
RECENT, BIASES, SLICES = 1024, 512, 64  # of the sampler: tokens, biases and parts of a row
PICK_BYTES = 128  # of a pick while picks are sorted


def sampler_bytes(vocab: int) -> int:
    """Return what drawing tokens takes on a GPU: for each row of a captured step its settings, the
    tokens that it looks at, and a copy of its logits with counts."""
    settings = 72 + 8  # and the token itself
    return DECODE_ROWS * (settings + 8 * RECENT + 12 * BIASES + 16 * SLICES + 8 * vocab)


def inputs_bytes(rows: int, sequences: int, pages: int) -> int:
    """Return the inputs of a step at fixed places, of few rows and of the most."""
    few, many = (DECODE_ROWS, DECODE_ROWS), (rows, sequences)
    return sum(36 * count + (8 + 4 * pages) * owners for count, owners in (few, many))


def _attention_bytes(layer: LayerShape, step: DeviceStep, sm: int) -> int:
    """What attention of many rows takes beside its results, by the way that prefill.py takes."""
    heads, dim, rows = layer.query_heads, layer.key_dim, step.rows
    summed = F32 if dim > MOST_KEPT_DIM else 0
    if layer.window:
        if not (step.halves or dim > MOST_FLASH_DIM or dim % FLASH_STEP):
            return 0
        rows = min(rows, MASKED_ROWS)
        seen = min(step.context, layer.window + rows)
        return rows * (MASK_BYTES * seen + (BF16 + BF16 + summed) * heads * dim)
    if dim > MOST_FLASH_DIM:
        rows = min(rows, WIDE_ROWS)
        scores = min(WIDE_SCORES, rows * heads * wide_stride(step.context))
        # Queries by key head and two sums; of a row its peak, its sum and a factor.
        return F32 * scores + rows * heads * ((BF16 + 2 * F32) * dim + 3 * F32)
    if not step.halves:
        return 0
    return rows * heads * dim * (BF16 + (summed if sm < FLASH_SM else 0))


def _cublas_bytes(sm: int) -> int:
    """The workspace that torch gives to cuBLAS on a stream; two streams use it."""
    return 2 * (32 * MIB if sm >= 90 else 8 * MIB + 128 * 1024)
