"""Lines: the entries of a plan for one device, each with how it came about."""

from collections.abc import Sequence

from headroom.formats.quants import BY_NAME
from headroom.machine.calibration import CPU_RUNTIME, GPU_EAGER, GPU_GRAPHS, NO_GRAPHS, gpu_runtime
from headroom.machine.devices import DeviceSpec
from headroom.machine.precision import feature_ring_bytes, staging_bytes
from headroom.plan.budget import (
    F32_BYTES,
    TREE_NODES,
    Line,
    PlanSettings,
    Rules,
    core_bytes,
    device_step,
    head_bytes,
    kv_bytes,
    logits_rows,
    norm_bytes,
    published_activation_bytes,
    recurrent_bytes,
    verify_bytes,
    workspace_phases,
)
from headroom.plan.device_scratch import inputs_bytes, library_bytes, sampler_bytes
from headroom.plan.shape import LayerShape, ModelShape
from headroom.plan.spans import Span
from headroom.units import MIB, gib


def layer_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return what one layer holds and remembers, its routed experts left out."""
    return (
        core_bytes([layer], settings) + kv_bytes(layer, settings) + recurrent_bytes(layer, settings)
    )


def stage_lines(
    model: ModelShape, span: Span, device: DeviceSpec, settings: PlanSettings, rules: Rules
) -> list[Line]:
    """Return the lines of one device that runs a span of layers: no experts, no embeddings."""
    first, last = span
    layers = model.layers[first : last + 1]
    ends = last == len(model.layers) - 1
    core = core_bytes(layers, settings) + (norm_bytes(model, settings) if ends else 0)
    norm = " and the final norm" if ends else ""
    lines = [
        Line("core_weights", core, f"layers {first} to {last}{norm}, {settings.weights}"),
        *_memory_lines(layers, settings),
        _staging_line(model, settings),
        workspace_line(model, layers, device, settings, rules),
    ]
    if rules.draft is not None:
        why = f"{settings.parallel} sequences x {TREE_NODES} tree nodes, f32"
        lines.append(Line("verify_scratch", verify_bytes(layers, settings), why))
    if ends:
        head = head_bytes(model, settings)
        lines.append(Line("head", head, f"{model.vocab} x {model.hidden}, {settings.weights}"))
        lines.append(_logits_line(model, device, settings, rules))
    if device.kind in ("cuda", "hip"):
        lines.append(_graphs_line(model, layers, device, settings))
    return lines


def _logits_line(
    model: ModelShape, device: DeviceSpec, settings: PlanSettings, rules: Rules
) -> Line:
    rows, vocab = logits_rows(settings, rules), model.vocab
    size, why = rows * vocab * F32_BYTES, f"{rows} rows x {vocab}, f32"
    if device.kind != "cpu":  # whatever kernels run its layers
        drawing = sampler_bytes(vocab)
        size, why = size + drawing, f"{why}, and {gib(drawing)} to draw tokens with"
    return Line("logits", size, why)


def _graphs_line(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> Line:
    """Return what captured steps hold, and what libraries allocate for themselves in a step."""
    inputs = inputs_bytes(settings.rows, settings.parallel, settings.sequence_pages)
    graphs = NO_GRAPHS if device.kind == "hip" else GPU_GRAPHS
    size, why = graphs.bytes + inputs, f"{graphs.source}; inputs of steps {gib(inputs)}"
    if settings.uses_arena:
        library = library_bytes(layers, device_step(model.hidden, settings), device.sm)
        size, why = size + library, f"{why}; torch and cuBLAS in a step {gib(library)}"
    else:  # single operations, which allocate what they need
        size, why = size + GPU_EAGER.bytes, f"{why}; {gib(GPU_EAGER.bytes)}: {GPU_EAGER.source}"
    return Line("graphs", size, why)


def draft_lines(
    draft: ModelShape, target: ModelShape, settings: PlanSettings, rules: Rules
) -> list[Line]:
    """Return the lines of a draft; its embedding and head are the target's."""
    weights = sum(layer.core_bytes for layer in draft.layers) + draft.norm_bytes
    cache = sum(kv_bytes(layer, settings) for layer in draft.layers)
    rows, width = settings.rows, draft.taps * (draft.tap_width or target.hidden)
    ring = feature_ring_bytes(rows, width, rules.feature_type)
    return [
        Line("draft_weights", weights, f"{len(draft.layers)} layers of {draft.name}"),
        Line("draft_kv", cache, f"{settings.cache_tokens} tokens"),
        Line("feature_ring", ring, f"{rows} rows x {width} values, {rules.feature_type}"),
    ]


def _staging_line(model: ModelShape, settings: PlanSettings) -> Line:
    rows, hidden, buffers = settings.stream_rows, model.hidden, model.staging_buffers
    kind = "f32" if settings.kernels in ("cuda", "triton") else settings.activation
    size = staging_bytes(hidden, rows, kind, buffers)
    why = f"{buffers} buffers x {rows} rows x {hidden} values, {kind}"
    if model.side_values:
        size += rows * model.side_values * F32_BYTES
        why += f", and {model.side_values} values a row as inputs of single layers, f32"
    return Line("staging", size, why)


def workspace_line(
    model: ModelShape,
    layers: Sequence[LayerShape],
    device: DeviceSpec,
    settings: PlanSettings,
    rules: Rules,
) -> Line:
    """Return the scratch of a step over a run of layers, by our formula or the published one."""
    if rules.published_activation:
        value_bytes = int(BY_NAME[settings.v_type].bytes_for(32) / 32)
        size = published_activation_bytes(
            model.hidden, model.ffn_width, settings.parallel, value_bytes, device.kind != "cpu"
        )
        return Line("workspace", size, "published formula: 8 x 8192 rows x width x 2 bytes")
    phases = workspace_phases(model, layers, device, settings)
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in phases.items())
    why = f"the largest phase of a step of {settings.rows} rows: {sizes}"
    return Line("workspace", max(phases.values()), why)


def _memory_lines(layers: Sequence[LayerShape], settings: PlanSettings) -> list[Line]:
    """Return what the layers remember: cache pages and recurrent state."""
    full = sum(1 for layer in layers if layer.kind == "full" and layer.owns_kv)
    windows = sum(1 for layer in layers if layer.kind == "window" and layer.owns_kv)
    why = f"{full} layers x {settings.pages} pages of {settings.page_size} tokens"
    if windows:
        window = max(layer.window for layer in layers)
        why += f", {windows} window layers x {settings.window_pages(window)} pages"
    why += f", keys {settings.k_type}, values {settings.v_type}"
    state = sum(recurrent_bytes(layer, settings) for layer in layers)
    recurrent = sum(1 for layer in layers if layer.kind == "recurrent")
    return [
        Line("kv", sum(kv_bytes(layer, settings) for layer in layers), why),
        Line("recurrent_state", state, f"{settings.parallel} sequences x {recurrent} layers, f32"),
    ]


def runtime_lines(device: DeviceSpec) -> list[Line]:
    """Return what a device loses to libraries and to caution; the engine allocates none of it."""
    reserve = min(512 * MIB, device.total_bytes // 16)
    taken = max(0, device.total_bytes - device.available_bytes)
    driver = min(taken, device.driver_bytes)
    why = f"{gib(reserve)} kept free"
    if driver:
        why += f", {gib(driver)} held by an idle driver, an estimate"
    if taken > driver:
        why += f", {gib(taken - driver)} held by others"
    # A GPU's context grows with the card, not with what may be taken of it.
    card = device.card_bytes or device.total_bytes
    system = "ROCm" if device.kind == "hip" else "CUDA"
    runtime = CPU_RUNTIME if device.kind == "cpu" else gpu_runtime(card, system)
    return [Line("runtime", runtime.bytes, runtime.source), Line("reserve", reserve + taken, why)]
