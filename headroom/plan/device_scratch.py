"""Scratch of a step on an NVIDIA GPU: the buffers that the parts of a layer take from one arena.

The sizes of buffers, the rules by which a path is chosen, and the frames within one operation are
declared beside the launchers (kernels/cuda/*_scratch.py); launchers, layers and planner call these
declarations. What stands here is which operations of a layer live together: each `count_...`
function takes the buffers of one part of a layer in the order of layers/cuda_block.py,
layers/cuda_rows.py and experts/cuda_ffn.py. That order is the control flow of the layers, which
needs torch; tests/split/test_model_memory.py runs it without a GPU and compares every buffer and
its place with what is counted here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import isqrt

from headroom.kernels.cuda import (
    attention_scratch,
    delta_net_scratch,
    experts_scratch,
    matmul_scratch,
    route_scratch,
)
from headroom.kernels.cuda.attention_scratch import (
    FLASH_STEP,
    MASKED_ROWS,
    MOST_FLASH_DIM,
    WIDE_ROWS,
    WIDE_SCORES,
    wide_stride,
)
from headroom.kernels.cuda.buffers import Buffer, PeakCount, ScratchCount, floats
from headroom.kernels.cuda.experts_scratch import ExpertShape
from headroom.kernels.cuda.sizes import DECODE_ROWS, MOST_OUTPUTS, is_decode
from headroom.plan.shape import BF16_BYTES, F32_BYTES, LayerPadding, LayerShape
from headroom.units import GIB, MIB

NARROW_TYPES = ("bf16", "f16")  # types that the fused kernels compute the prefill path in
# Of all buffers on the device through which weights are loaded; more does not load faster.
UPLOAD_BYTES = 128 * MIB
FLASH_SM = 80  # the first GPUs with torch's flash attention
MOST_KEPT_DIM = 128  # wider heads are summed in memory by torch's memory-efficient kernel
MASK_BYTES = 8  # per row and key, while a mask is built and converted
PICK_BYTES = 128  # of torch's memory per pick: sorted places, ids, weights and temporaries


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The largest planned step, and the other settings on which scratch depends."""

    hidden: int
    rows: int
    spans: int  # most sequences that have rows
    context: int
    unpack_bytes: int  # most bytes of weights unpacked at a time
    halves: bool = False  # the prefill path computes in f16, with powers of two and float32 answers

    @property
    def dtype(self) -> str:
        """The type of rows on the prefill path."""
        return "f16" if self.halves else "bf16"


@dataclass(frozen=True, slots=True)
class SpanRows:
    """The rows of one sequence in a step."""

    rows: int
    start: int  # tokens of the sequence before them


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step: its rows by sequence, and the settings of the plan."""

    spans: tuple[SpanRows, ...]
    settings: DeviceStep

    @property
    def rows(self) -> int:
        """The rows of all sequences."""
        return sum(span.rows for span in self.spans)

    @property
    def decodes(self) -> bool:
        """Whether the step takes the decode path."""
        return is_decode(self.rows)

    @property
    def chunks(self) -> int:
        """The chunks of gated linear attention, counted from each sequence's first row."""
        return sum(-(-span.rows // delta_net_scratch.CHUNK) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer was loaded, as far as its buffers depend on it and the planner cannot know it.

    None stands for every possibility: the planner counts the largest of them.
    """

    # Indices of matrices that are stored as one weight with the matrix before them (same input).
    merged: frozenset[int] | None = None
    tiled: bool | None = None  # whether weights lie in tiles; else they are plain rows of 16 bits
    # Whether some experts are cold: prefill then streams them, and decode may ask the CPU.
    cold: bool | None = None

    def weight_rows(self, outputs: Sequence[int]) -> Iterator[int]:
        """Yield the rows of each weight that holds matrices of so many outputs."""
        if self.merged is None:  # count every run of neighbours
            for first in range(len(outputs)):
                for end in range(first + 1, min(first + MOST_OUTPUTS, len(outputs)) + 1):
                    yield sum(outputs[first:end])
            return
        starts = [index for index in range(len(outputs)) if index not in self.merged]
        for first, end in pairwise((*starts, len(outputs))):
            yield sum(outputs[first:end])

    @property
    def tilings(self) -> tuple[bool, ...]:
        """The values that `tiled` may have."""
        return (True, False) if self.tiled is None else (self.tiled,)

    @property
    def colds(self) -> tuple[bool, ...]:
        """The values that `cold` may have."""
        return (True, False) if self.cold is None else (self.cold,)


ANY_VARIANT = Variant()
Part = Callable[[ScratchCount, LayerShape, StepRows, Variant], None]


def unpack_bytes_for(total_bytes: int) -> int:
    """Return how many bytes of weights a GPU unpacks at a time for the prefill path.

    A 128th of its memory: 64 MiB of 8 GiB. More than the largest matrices of today is of no use.
    """
    return min(max(total_bytes // 128, 64 * MIB), GIB)


def parts_of(layer: LayerShape) -> dict[str, Part]:
    """Return the parts of a layer, in the order in which they run; each has the whole arena."""
    parts: dict[str, Part] = {}
    if layer.kind == "recurrent":
        parts["recurrent"] = count_delta_net
    else:
        parts["attention"] = count_attention
    if not layer.experts:
        parts["feed-forward"] = count_mlp
    elif layer.post_norms:
        parts["experts"] = count_experts_and_mlp
    else:
        parts["experts"] = count_experts
    if layer.side_width:
        parts["per-layer inputs"] = count_per_layer_inputs
    return parts


def device_phases(layers: Sequence[LayerShape], step: DeviceStep) -> dict[str, int]:
    """Return the most scratch of each kind of part; parts run in turn, so the largest counts."""
    phases: dict[str, int] = {}
    short = _short_context(step)
    for layer in _without_weights(tuple(layers)):
        packed = packed_rows(layer)
        for name, part in parts_of(layer).items():
            own = step if part is count_attention else short
            phases[name] = max(phases.get(name, 0), _peak(part, layer, own, packed))
    return phases | {"loading": UPLOAD_BYTES}


def _short_context(step: DeviceStep) -> DeviceStep:
    """Return the step with a context that is no longer than it.

    Only attention depends on a longer one. The solver tries many contexts, so the peaks of other
    parts are computed once for all of them.
    """
    return replace(step, context=min(step.context, max(step.rows, DECODE_ROWS)))


def peak_buffers(layers: Sequence[LayerShape], step: DeviceStep, phase: str) -> PeakCount:
    """Return the count of a phase's largest step, with the buffers that it holds at its peak."""
    largest = PeakCount()
    for layer in _without_weights(tuple(layers)):
        part = parts_of(layer).get(phase)
        if part is None:
            continue
        own = step if part is count_attention else _short_context(step)
        for rows in largest_steps(layer, own, packed_rows(layer)):
            count = PeakCount()
            part(count, layer, rows, ANY_VARIANT)
            largest = max(largest, count, key=lambda found: found.peak_bytes)
    return largest


@lru_cache(maxsize=64)
def _without_weights(layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers that differ in more than the bytes of weights, which scratch ignores."""
    no_padding = LayerPadding()
    alike = (
        replace(
            layer,
            core_bytes=0,
            core_values=0,
            float_values=0,
            expert_bytes=0,
            expert_values=0,
            panels=no_padding,
            tiles=no_padding,
        )
        for layer in layers
    )
    return tuple(dict.fromkeys(alike))


def packed_rows(layer: LayerShape) -> int:
    """Return the most rows of a step that a layer's experts multiply packed; 0 without experts."""
    if not layer.experts:
        return 0
    return experts_scratch.sorted_rows(layer.experts, layer.experts_used)


@lru_cache(maxsize=4096)
def _peak(part: Part, layer: LayerShape, step: DeviceStep, packed: int) -> int:
    """Return the most scratch that a part of a layer takes in any step.

    `packed` is the layer's `packed_rows`.
    """
    peak = 0
    for rows in largest_steps(layer, step, packed):
        count = ScratchCount()
        part(count, layer, rows, ANY_VARIANT)
        peak = max(peak, count.peak_bytes)
    return peak


def largest_steps(layer: LayerShape, step: DeviceStep, packed: int) -> Iterator[StepRows]:
    """Yield the steps among which is the one that takes most scratch, of any part of a layer.

    Every buffer grows with the rows of a step, but for a change of path: from decode to prefill,
    and from packed to unpacked experts. Attention gathers most for a single long sequence, linear
    attention has most chunks with many sequences.
    """
    sizes = {DECODE_ROWS, max(step.rows, DECODE_ROWS)}
    if layer.experts:
        sizes.add(max(DECODE_ROWS, min(step.rows, packed)))
    for rows in sizes:
        for sequences in {1, min(step.spans, rows) if rows > DECODE_ROWS else 1}:
            yield StepRows(tuple(_long_spans(rows, sequences, step.context)), step)


def _long_spans(rows: int, sequences: int, context: int) -> Iterator[SpanRows]:
    """Yield one long sequence at the end of its context, and one row each of the others."""
    others = sequences - 1
    while rows:
        own = max(1, min(rows - others, context))
        yield SpanRows(own, context - own)
        rows, others = rows - own, max(0, others - 1)


def _rows_into_product(count: ScratchCount, step: StepRows, columns: int) -> None:
    """Take rows in 16 bits, as products read them."""
    if step.decodes:
        count.take(matmul_scratch.half_rows(step.rows, columns))
    else:
        count.take(matmul_scratch.narrow_rows(step.rows, columns, step.settings.dtype))


def _normed_rows(count: ScratchCount, step: StepRows, normed: Buffer | None) -> None:
    """Take normed rows; in f16 also the float32 rows `normed`, if the caller does not keep them."""
    _rows_into_product(count, step, step.settings.hidden)
    if normed is not None and step.settings.halves and not step.decodes:
        with count.frame():
            count.take(normed)


def _hidden_floats(step: StepRows) -> Buffer:
    return floats(step.rows, step.settings.hidden)


def _products(
    count: ScratchCount,
    step: StepRows,
    sizes: tuple[Sequence[int], int],
    variant: Variant,
    rows_floats: Buffer | None,
) -> None:
    """Take what products with matrices of (outputs, columns) need besides rows and results.

    `rows_floats` is what plain weights on the decode path read, if it must be computed for them.
    """
    outputs, columns = sizes
    settings = step.settings
    weights = list(variant.weight_rows(outputs))
    if not step.decodes:
        rows, dtype, most = step.rows, settings.dtype, settings.unpack_bytes
        for tiled in variant.tilings:
            matmul_scratch.count_unpacked(count, rows, weights, columns, dtype, most, tiled=tiled)
    elif rows_floats is not None and False in variant.tilings:
        for _ in count.largest(weights):
            with count.frame():
                count.take(rows_floats)


def _add_product(
    count: ScratchCount,
    layer: LayerShape,
    step: StepRows,
    columns: int,
    variant: Variant,
    rows_floats: Buffer | None,
) -> None:
    """Take the buffers of a part's last product, and of its result if that is normed afterwards."""
    if layer.post_norms:
        count.take(_hidden_floats(step))
    _products(count, step, ((step.settings.hidden,), columns), variant, rows_floats)


def count_attention(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant = ANY_VARIANT
) -> None:
    """Count attention over pages."""
    rows, heads, dim, hidden = step.rows, layer.query_heads, layer.key_dim, step.settings.hidden
    _normed_rows(count, step, _hidden_floats(step))
    outputs = layer.projections
    count.take(*matmul_scratch.products(rows, outputs))
    _products(count, step, (outputs, hidden), variant, _hidden_floats(step))
    count.take(attention_scratch.queries(rows, heads, dim))
    if step.decodes:
        count.take(attention_scratch.partial_sums(rows, heads, dim, step.settings.context))
        count.take(attention_scratch.attended(rows, heads, dim))
    else:
        count.take(attention_scratch.attended(rows, heads, dim))
        dtype = step.settings.dtype
        for span in step.spans:
            first = attention_scratch.first_key(span.start, layer.window)
            keys = span.start + span.rows - first
            with count.frame():
                count.take(
                    attention_scratch.span_buffers(
                        span.rows, keys, heads, layer.kv_heads, dim, dtype
                    )
                )
    _rows_into_product(count, step, heads * dim)
    _add_product(count, layer, step, heads * dim, variant, None)


def count_delta_net(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant = ANY_VARIANT
) -> None:
    """Count gated linear attention."""
    rows, heads = step.rows, layer.state_heads
    inner = heads * isqrt(layer.state_values // heads)
    channels = layer.mixer_width // 2 - inner
    outputs = (channels, inner, heads, heads)
    _normed_rows(count, step, _hidden_floats(step))
    count.take(*matmul_scratch.products(rows, outputs))
    _products(count, step, (outputs, step.settings.hidden), variant, _hidden_floats(step))
    answers = delta_net_scratch.answers(rows, heads)
    if step.decodes:
        delta_net_scratch.count_step(count, rows, channels, heads)
    else:
        delta_net_scratch.count_prefill(count, rows, channels, heads, step.chunks)
    _rows_into_product(count, step, inner)
    if step.settings.halves and not step.decodes:
        with count.frame():
            count.take(answers)
    _products(count, step, ((step.settings.hidden,), inner), variant, answers)


def count_mlp(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant = ANY_VARIANT
) -> None:
    """Count the dense feed-forward network."""
    inner = _count_gated(count, step, layer.ffn_width, variant, normed=True)
    _add_product(count, layer, step, layer.ffn_width, variant, inner)


def _count_gated(
    count: ScratchCount, step: StepRows, width: int, variant: Variant, *, normed: bool
) -> Buffer:
    """Count gates, ups and their products; return what plain weights read of these."""
    if normed:
        _normed_rows(count, step, _hidden_floats(step))
    inner = floats(step.rows, width)
    count.take(*matmul_scratch.products(step.rows, (width, width)))
    sizes = ((width, width), step.settings.hidden)
    _products(count, step, sizes, variant, _hidden_floats(step))
    _rows_into_product(count, step, width)
    return inner


def count_experts(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant = ANY_VARIANT
) -> None:
    """Count routed experts, with a shared expert or without."""
    for tiled in variant.tilings:
        for cold in variant.colds:
            with count.frame():
                _count_experts(count, layer, step, Variant(variant.merged, tiled, cold))


def _count_experts(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant
) -> None:
    rows, used, width = step.rows, layer.experts_used, layer.ffn_width
    count.take(_hidden_floats(step))  # normed rows, which the router reads
    _rows_into_product(count, step, step.settings.hidden)
    count.take(route_scratch.logits(rows, layer.router_outputs))
    asks_cpu = step.decodes and variant.cold
    if asks_cpu:  # first, so that the CPU computes while the GPU does
        count.take(route_scratch.picks(rows, used))
    # On the decode path the kernels of routed experts also run a shared expert in tiles.
    runs_shared = step.decodes and variant.tiled and experts_scratch.runs_with_routed(width)
    if width and not runs_shared:
        inner = _count_gated(count, step, width, variant, normed=False)
        count.take(_hidden_floats(step))
        _products(count, step, ((step.settings.hidden,), width), variant, inner)
    if step.decodes and not asks_cpu and experts_scratch.does_top_k(rows):
        count.take(experts_scratch.chosen_weights(rows, used))
    elif not asks_cpu:
        count.take(route_scratch.picks(rows, used))
    _count_routed(count, layer, step, variant, width if runs_shared else 0)


def count_experts_and_mlp(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant = ANY_VARIANT
) -> None:
    """Count routed experts together with a dense network, each with its own norms."""
    count.take(_hidden_floats(step))  # the experts' output
    if step.decodes:
        _rows_into_product(count, step, step.settings.hidden)
        scores_at_once = route_scratch.can_score_with_norm(step.settings.hidden)
    else:
        _normed_rows(count, step, _hidden_floats(step))
        scores_at_once = False
    if not scores_at_once:
        count.take(_hidden_floats(step))  # rows after the router's own norm
    count.take(route_scratch.logits(step.rows, layer.router_outputs))
    count.take(route_scratch.picks(step.rows, layer.experts_used))
    _count_routed(count, layer, step, variant)
    inner = _count_gated(count, step, layer.ffn_width, variant, normed=True)
    count.take(_hidden_floats(step))
    sizes = ((step.settings.hidden,), layer.ffn_width)
    _products(count, step, sizes, variant, inner)
    count.take(_hidden_floats(step))  # after the dense part's post-norm


def _count_routed(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant, shared_width: int = 0
) -> None:
    """Count the products of each row's experts."""
    rows, used, settings = step.rows, layer.experts_used, step.settings
    shape, picks = ExpertShape(layer.expert_width, settings.hidden), rows * used
    if step.decodes and experts_scratch.shares_picks(rows, over_link=any(variant.colds)):
        count.take(experts_scratch.shared_pick_buffers(rows, used, shape, shared_width))
        return
    if step.decodes:
        count.take(experts_scratch.decode_buffers(rows, used, layer.expert_width, shared_width))
        return
    for cold in variant.colds:
        if not cold and rows <= packed_rows(layer):
            experts_scratch.count_packed(count, layer.experts, shape, picks)
        else:
            experts_scratch.count_groups(
                count, layer.experts, shape, picks, settings.dtype, settings.unpack_bytes
            )


def count_per_layer_inputs(
    count: ScratchCount, layer: LayerShape, step: StepRows, variant: Variant = ANY_VARIANT
) -> None:
    """Count the part that reads per-layer inputs."""
    width, hidden = layer.side_width, step.settings.hidden
    inner = floats(step.rows, width)
    _rows_into_product(count, step, hidden)
    count.take(inner)
    _products(count, step, ((width,), hidden), variant, None)
    _rows_into_product(count, step, width)
    count.take(_hidden_floats(step))
    _products(count, step, ((hidden,), width), variant, inner)


def library_bytes(layers: Sequence[LayerShape], step: DeviceStep, sm: int) -> int:
    """Return what torch allocates outside the arena while a step runs.

    These are the results of attention and of grouped products, temporaries of sorting picks, rotary
    tables, and cuBLAS's workspace. Gated linear attention allocates nothing.
    """
    rows, most = step.rows, 0
    if is_decode(rows):
        return _cublas_bytes(sm)
    for layer in dict.fromkeys(layers):
        size, picks = 0, rows * layer.experts_used
        if layer.kind != "recurrent":
            width = layer.query_heads * layer.key_dim
            size = BF16_BYTES * rows * width + F32_BYTES * rows * layer.query_heads
            size += _attention_bytes(layer, step, sm)
        answer = F32_BYTES if step.halves else BF16_BYTES
        grouped = answer * picks * (2 * layer.expert_width + step.hidden) + PICK_BYTES * picks
        most = max(most, size, grouped if layer.experts else 0)
    rope = 4 * F32_BYTES * rows * max(layer.key_dim for layer in layers)
    return most + rope + _cublas_bytes(sm)


def inputs_bytes(rows: int, sequences: int, pages: int) -> int:
    """Return the bytes of step inputs at fixed addresses: of captured steps and of the largest."""
    few, many = (DECODE_ROWS, DECODE_ROWS), (rows, sequences)
    return sum(36 * count + (8 + 4 * pages) * owners for count, owners in (few, many))


def _attention_bytes(layer: LayerShape, step: DeviceStep, sm: int) -> int:
    """Return what prefill attention allocates besides its result, by the kernel that it uses."""
    heads, dim, rows = layer.query_heads, layer.key_dim, step.rows
    summed = F32_BYTES if dim > MOST_KEPT_DIM else 0
    if layer.window:
        if not (step.halves or dim > MOST_FLASH_DIM or dim % FLASH_STEP):
            return 0
        rows = min(rows, MASKED_ROWS)
        seen = min(step.context, layer.window + rows)
        return rows * (MASK_BYTES * seen + (BF16_BYTES + BF16_BYTES + summed) * heads * dim)
    if dim > MOST_FLASH_DIM:
        rows = min(rows, WIDE_ROWS)
        scores = min(WIDE_SCORES, rows * heads * wide_stride(step.context))
        # Queries by KV head and two sums; per row a maximum, a sum and a factor.
        return F32_BYTES * scores + rows * heads * (
            (BF16_BYTES + 2 * F32_BYTES) * dim + 3 * F32_BYTES
        )
    if not step.halves:
        return 0
    return rows * heads * dim * (BF16_BYTES + (summed if sm < FLASH_SM else 0))


def _cublas_bytes(sm: int) -> int:
    """Return the workspaces that torch gives to cuBLAS: one for each of two streams."""
    return 2 * (32 * MIB if sm >= 90 else 8 * MIB + 128 * 1024)
