"""workspace_terms(): the scratch of a step's largest phase, buffer by buffer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from headroom.kernels.cuda.buffers import ITEM_BYTES, Buffer
from headroom.kernels.native import scratch
from headroom.machine.devices import DeviceSpec
from headroom.plan.device_scratch import peak_buffers
from headroom.plan.settings import PlanSettings
from headroom.plan.shape import F32_BYTES, LayerShape, ModelShape
from headroom.plan.show.terms import Factor, Term, plain_term
from headroom.plan.workspace import (
    device_step,
    native_experts_scratch,
    native_layer_scratch,
    native_layer_sizes,
    workspace_phases,
)


def workspace_terms(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> Iterator[Term]:
    """Yield the buffers of the largest phase; phases follow each other and share the memory."""
    phases = workspace_phases(model, layers, device, settings)
    largest = max(phases, key=lambda name: phases[name])
    terms = list(_phase_terms(model.hidden, layers, settings, largest))
    if not terms:
        yield plain_term(phases[largest], f"in the phase {largest}")
        return
    yield from terms
    rest = phases[largest] - sum(term.bytes for term in terms)
    yield plain_term(rest, "between buffers, which begin at round addresses")


def _phase_terms(
    hidden: int, layers: Sequence[LayerShape], settings: PlanSettings, phase: str
) -> Iterator[Term]:
    """Yield the buffers of a phase; none if its size is no sum of declared buffers."""
    if settings.uses_arena and phase != "loading":
        count = peak_buffers(layers, device_step(hidden, settings), phase)
        for (name, buffer), times in Counter(count.held).items():
            yield _buffer_term(name, buffer, times, settings.rows)
    elif settings.kernels == "native" and phase == "layer":
        layer = max(layers, key=lambda one: native_layer_scratch(hidden, one, settings))
        yield from _native_layer(native_layer_sizes(hidden, layer), settings)
    elif settings.kernels == "native":
        layer = max(layers, key=lambda one: native_experts_scratch(hidden, one, settings))
        yield from _native_experts(hidden, layer, settings)


def _buffer_term(name: str, buffer: Buffer, times: int, rows: int) -> Term:
    factors = [Factor(times, "buffer")] if times > 1 else []
    values = prod(buffer.shape)
    if len(buffer.shape) > 1 and buffer.shape[0] == rows:
        factors.append(Factor(rows, "row"))
        values //= rows
    factors += [Factor(values, "value"), Factor(ITEM_BYTES[buffer.dtype], "byte")]
    return Term(tuple(factors), f"of {name.replace('_', ' ') or 'rows'}", buffer.dtype)


def _native_layer(sizes: scratch.LayerSizes, settings: PlanSettings) -> Iterator[Term]:
    rows, wide = Factor(settings.rows, "row"), Factor(F32_BYTES, "byte")
    widths = {
        "normed rows": sizes.hidden,
        "queries": sizes.queries,
        "attention's output": sizes.queries,
        "keys": sizes.keys,
        "values": sizes.values,
        "what is between up and down": sizes.ffn_width,
    }
    for what, width in widths.items():
        yield Term((rows, Factor(width, "value"), wide), f"of {what}", "f32")
    inputs = (sizes.hidden, sizes.hidden, sizes.queries, sizes.ffn_width)
    for width, times in Counter(inputs).items():
        yield _in_24_bits(settings.rows, width, times)
    partial = scratch.partial_scratch(sizes, settings.context)
    sequences = Factor(settings.parallel, "sequence")
    yield Term((sequences, Factor(partial, "byte")), "of attention's partial results")


def _native_experts(hidden: int, layer: LayerShape, settings: PlanSettings) -> Iterator[Term]:
    rows, used = Factor(settings.rows, "row"), Factor(layer.experts_used, "expert")
    wide = Factor(F32_BYTES, "byte")
    copies = (rows, used, Factor(hidden, "value"), wide)
    yield Term(copies, "of copies of each row for its experts", "f32")
    inner = (rows, used, Factor(layer.expert_width, "value"), wide)
    yield Term(inner, "of what is between up and down", "f32")
    picks = settings.rows * layer.experts_used
    yield _in_24_bits(picks, hidden, 1)
    yield _in_24_bits(picks, layer.expert_width, 1)
    orders = layer.experts + 1 + 2 * picks
    yield Term((Factor(orders, "value"), Factor(scratch.I32_BYTES, "byte")), "of orders of picks")


def _in_24_bits(rows: int, width: int, times: int) -> Term:
    size = Factor(scratch.matmul_scratch(rows, width), "byte")
    factors = (Factor(times, "input"), size) if times > 1 else (size,)
    note = f"{rows:,} rows x {width:,} values, with a scale and sums for 32 values"
    return Term(factors, "of inputs in 24 bits" if times > 1 else "of an input in 24 bits", note)
