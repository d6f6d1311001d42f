"""Lines: the entries of a plan, with the bytes of each and how the number came about."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.errors import PlanError
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.sampler_tables import sampler_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.calibration import (
    CPU_RUNTIME,
    GPU_EAGER,
    GPU_GRAPHS,
    NO_GRAPHS,
    gpu_runtime,
)
from headroom.machine.devices import DeviceSpec
from headroom.plan.device_scratch import inputs_bytes, library_bytes
from headroom.plan.settings import FeatureRequest, PlanRequest, PlanSettings, pages_for
from headroom.plan.shape import F32_BYTES, NO_PADDING, LayerRange, LayerShape, ModelShape
from headroom.plan.workspace import device_step, workspace_phases
from headroom.units import GIB, MIB, counted, gib

WORKER_SENDS = 2  # buffers of a worker that sends: one is sent while the next step fills the other
NOT_ALLOCATED = frozenset({"graphs", "runtime", "reserve"})  # lines the engine does not allocate


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of a plan."""

    name: str  # a stable word of the plan's JSON
    bytes: int
    why: str  # how the number came about, for people; nothing decides by it


def type_bytes(name: str, values: int) -> int:
    """Return the bytes of `values` values in a type."""
    return BY_NAME[name].bytes_for(values)


def checked_row_bytes(name: str, values: int, what: str) -> int:
    """Return the bytes of one row in a type, or refuse a row that is not whole blocks of it."""
    block = BY_NAME[name].block
    if values % block:
        raise PlanError(
            f"{what} has {values} values, which are not whole {name} blocks of {block}.",
            hint="Choose f32, f16 or bf16 for it.",
        )
    return type_bytes(name, values)


def held_bytes(packed: int, values: int, float_values: int, settings: PlanSettings) -> int:
    """Return the bytes of weights in memory: packed as in the file, or unpacked.

    Unpacked matrices have the compute type; `float_values` of the values (norms, biases) are f32.
    """
    if settings.weights == "packed":
        return packed
    matrices = type_bytes(settings.compute_type, values - float_values)
    return matrices + float_values * F32_BYTES


def core_bytes(layers: Sequence[LayerShape], settings: PlanSettings) -> int:
    """Return the bytes of the layers' weights without their routed experts."""
    return sum(
        held_bytes(layer.core_bytes, layer.core_values, layer.float_values, settings)
        for layer in layers
    )


def norm_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of the final norm and of other weights that belong to no layer."""
    floats = model.norm_values - model.norm_matrix_values
    return held_bytes(model.norm_bytes, model.norm_values, floats, settings)


def outer_bytes(model: ModelShape, settings: PlanSettings, place: "StagePlace") -> int:
    """Return the bytes of weights that belong to no layer, of the stage that holds them.

    The last stage has the final norm. All others make per-layer inputs, which the first one does.
    """
    whole = norm_bytes(model, settings)
    final = min(whole, model.hidden * F32_BYTES)
    return (whole - final if place.begins else 0) + (final if place.ends else 0)


def embed_bytes(model: ModelShape, settings: PlanSettings, *, looked_up: bool = False) -> int:
    """Return the bytes of the token table.

    A table that is only looked up has the layout of files, even if it is the head of a later stage.
    """
    added = model.embed_added if looked_up else NO_PADDING
    packed, values = model.embed_bytes - added.bytes, model.embed_values - added.values
    return held_bytes(packed, values, 0, settings)


def lookup_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of other tables than the token table; kernels only read rows of them."""
    return held_bytes(model.lookup_bytes, model.lookup_values, 0, settings)


def head_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of a head that is not the token table."""
    return held_bytes(model.head_bytes, model.head_values, 0, settings)


def cached_token_bytes(layer: LayerShape, k_type: str, v_type: str) -> int:
    """Return the bytes of one token in the cache that a layer reads, its own or another layer's."""
    if layer.kind == "recurrent" or not layer.kv_heads:
        return 0
    key = checked_row_bytes(k_type, layer.key_dim, "A key head")
    value = checked_row_bytes(v_type, layer.value_dim, "A value head")
    return layer.kv_heads * (key + value)


def kv_token_bytes(layer: LayerShape, k_type: str, v_type: str) -> int:
    """Return the bytes that one token adds to a layer's own cache."""
    return cached_token_bytes(layer, k_type, v_type) if layer.owns_kv else 0


def kv_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return the bytes of a layer's KV pages; a layer with a window has a fixed number of them."""
    pages = settings.window_pages(layer.window) if layer.kind == "window" else settings.pages
    token = kv_token_bytes(layer, settings.k_type, settings.v_type)
    return pages * settings.page_size * token


def recurrent_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return the bytes of a layer's recurrent state and convolution inputs, always f32."""
    return settings.parallel * (layer.state_values + layer.conv_values) * F32_BYTES


def logits_rows(settings: PlanSettings) -> int:
    """Return the rows that get logits at a time; a captured step computes those of all its rows."""
    rows = settings.logits_rows
    return max(rows, DECODE_ROWS) if settings.kernels == "cuda" else rows


def snapshot_bytes(layers: Sequence[LayerShape], settings: PlanSettings) -> int:
    """Return the bytes that one snapshot of a sequence has of some layers.

    These are recurrent states, and of layers with a window the pages that the last window touches.
    """
    total = 0
    for layer in layers:
        total += (layer.state_values + layer.conv_values) * F32_BYTES
        if layer.kind == "window":
            ring = settings.window_pages(layer.window) // settings.parallel
            pages = min(ring, pages_for(layer.window) + 1)
            token = kv_token_bytes(layer, settings.k_type, settings.v_type)
            total += pages * settings.page_size * token
    return total


def snapshots_bytes(
    model: ModelShape,
    layer_range: LayerRange,
    settings: PlanSettings,
    draft: ModelShape | None,
) -> int:
    """Return the bytes of all snapshots of a stage; the last one has logits and the draft, too.

    The engine's process keeps the logits, so that they are no part of a worker's memory.
    """
    layers = cached_layers(model, layer_range, draft)
    size = settings.snapshots * snapshot_bytes(layers, settings)
    if StagePlace.of(layer_range, len(model.layers)).ends and not settings.worker:
        size += kept_logits_bytes(model, settings)
        size += settings.snapshots * mtp_snapshot_bytes(model, settings)
    return size


def cached_layers(
    model: ModelShape, layer_range: LayerRange, draft: ModelShape | None
) -> tuple[LayerShape, ...]:
    """Return the layers of a stage, and those of a draft at the last stage."""
    first, last = layer_range
    ends = StagePlace.of(layer_range, len(model.layers)).ends
    return (*model.layers[first : last + 1], *(draft.layers if ends and draft is not None else ()))


def kept_logits_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of the logits after the last token of each snapshot, in f32."""
    return settings.snapshots * model.vocab * F32_BYTES


def mtp_snapshot_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes that a snapshot has of the hidden state that a prediction head reads."""
    return model.hidden * F32_BYTES if settings.mtp else 0


def mtp_page_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of a page of a prediction head; 0 if none guesses."""
    if not settings.mtp or model.mtp is None:
        return 0
    return settings.page_size * kv_token_bytes(model.mtp, settings.k_type, settings.v_type)


def mtp_lines(model: ModelShape, settings: PlanSettings) -> list[Line]:
    """Return the lines of the prediction head; it uses the model's embedding and vocabulary."""
    shape = model.mtp
    assert shape is not None
    weights = core_bytes([shape], settings) + shape.all_expert_bytes
    cache = settings.draft_pages * mtp_page_bytes(model, settings)
    rows = settings.parallel + settings.verify_rows
    pages = f"1 layer x {counted(settings.draft_pages, 'page')} of {settings.page_size} tokens"
    state = f"{counted(rows, 'row')} x {model.hidden} values, f32"
    return [
        Line(
            "draft_weights", weights, f"the layer that predicts further ahead, {settings.weights}"
        ),
        Line("draft_kv", cache, f"{pages}, keys {settings.k_type}, values {settings.v_type}"),
        Line("draft_state", rows * model.hidden * F32_BYTES, state),
    ]


def host_page_bytes(layers: Sequence[LayerShape], settings: PlanSettings) -> int:
    """Return the bytes of one page in the layers whose pages the engine lends to sequences."""
    full = [layer for layer in layers if layer.kind == "full"]
    token = sum(kv_token_bytes(layer, settings.k_type, settings.v_type) for layer in full)
    return settings.page_size * token


def verify_bytes(layers: Sequence[LayerShape], settings: PlanSettings) -> int:
    """Return the bytes that recurrent layers keep of a step with guesses, in f32."""
    values = sum(layer.verify_values for layer in layers)
    return settings.verify_rows * values * F32_BYTES


@dataclass(frozen=True, slots=True)
class PublishedActivation:
    """The activation reserve of one device by another project's published formula, a heuristic.

    It is the smaller of 8 x rows x width x 2 bytes (at least 8192 rows) and an older flat reserve
    of 30 GiB over the bytes of a cached value, plus 2 GiB where graphs are captured. We have not
    calibrated it; our own workspace formula counts each buffer of a step instead.
    """

    rows: int
    width: int  # 0: unknown, so that only the flat reserve counts
    flat_bytes: int
    graph_bytes: int

    @property
    def scaled_bytes(self) -> int:
        """The term that grows with the width of the model."""
        return 8 * self.rows * self.width * 2

    @property
    def bytes(self) -> int:
        """The whole reserve."""
        scaled = self.scaled_bytes if self.width else self.flat_bytes
        return min(scaled, self.flat_bytes) + self.graph_bytes

    @property
    def why(self) -> str:
        """The formula with its numbers."""
        scaled = f"8 x {self.rows} rows x {self.width} values x 2 bytes = {gib(self.scaled_bytes)}"
        if not self.width or self.scaled_bytes > self.flat_bytes:
            scaled = f"a flat {gib(self.flat_bytes)}"
        graphs = f" + {gib(self.graph_bytes)} for captured graphs" if self.graph_bytes else ""
        return f"published formula, an uncalibrated heuristic: {scaled}{graphs}"


def published_activation(
    hidden: int, ffn_width: int, batch: int, kv_value_bytes: int, graphs: bool = False
) -> PublishedActivation:
    """Return the activation reserve of one device by the published formula."""
    return PublishedActivation(
        rows=max(batch, 8192),
        width=max(hidden, ffn_width),
        flat_bytes=30 // max(1, kv_value_bytes) * GIB,
        graph_bytes=2 * GIB if graphs else 0,
    )


def staging_bytes(hidden: int, rows: int, kind: str, buffers: int = 2) -> int:
    """Return the bytes of `buffers` buffers of `rows` rows between layers, in the type `kind`."""
    return type_bytes(kind, hidden) * rows * buffers


def feature_ring_bytes(rows: int, width: int, feature_type: str) -> int:
    """Return the bytes of a ring of `rows` tapped features, each `width` values wide."""
    return checked_row_bytes(feature_type, width, "A feature row") * rows


def features_line(
    model: ModelShape, layer_range: LayerRange, settings: PlanSettings, request: FeatureRequest
) -> Line:
    """Return the line of the output rows that are kept of some layers of a stage."""
    rows, count = settings.stream_rows, len(request.within(layer_range))
    size = count * feature_ring_bytes(rows, model.hidden, request.type)
    why = f"{counted(count, 'layer')} x {counted(rows, 'row')} x {model.hidden} values"
    return Line("features", size, f"{why}, {request.type}")


def layer_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return the bytes of one layer: weights, KV pages and recurrent state; no routed experts."""
    return (
        core_bytes([layer], settings) + kv_bytes(layer, settings) + recurrent_bytes(layer, settings)
    )


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where a stage stands in the order of the stages."""

    begins: bool  # it looks tokens up; otherwise rows come from the stage before
    ends: bool  # it has the head; otherwise rows go to the stage after

    @classmethod
    def of(cls, layer_range: LayerRange, layers: int) -> "StagePlace":
        """Return the place of a stage with a range of so many layers."""
        return cls(layer_range.first == 0, layer_range.last == layers - 1)

    @property
    def neighbours(self) -> int:
        """The stages that it takes rows from and hands rows to: 0, 1 or 2."""
        return (not self.begins) + (not self.ends)


def stage_lines(
    model: ModelShape,
    layer_range: LayerRange,
    device: DeviceSpec,
    settings: PlanSettings,
    request: PlanRequest,
) -> list[Line]:
    """Return the lines of one device that runs a range of layers: no experts, no embeddings."""
    first, last = layer_range
    layers = model.layers[first : last + 1]
    place = StagePlace.of(layer_range, len(model.layers))
    ends = place.ends
    guesses = ends and settings.mtp and model.mtp is not None
    draft = request.draft if ends else None
    cached = cached_layers(model, layer_range, draft)
    core = core_bytes(layers, settings) + outer_bytes(model, settings, place)
    norm = " and the final norm" if ends else ""
    lines = [
        Line("core_weights", core, f"{layer_range.words}{norm}, {settings.weights}"),
        *_memory_lines(layers, settings),
        staging_line(model, layer_range, settings),
        workspace_line(
            model,
            (*layers, model.mtp) if guesses and model.mtp else cached,
            device,
            settings,
            request,
        ),
    ]
    if request.features is not None and request.features.within(layer_range):
        lines.append(features_line(model, layer_range, settings, request.features))
    if device.holds_all and settings.snapshots:
        size = snapshots_bytes(model, layer_range, settings, request.draft)
        lines.append(snapshots_line(size, settings))
    page = host_page_bytes(cached, settings)
    page += mtp_page_bytes(model, settings) if ends else 0
    if device.holds_all and page and settings.host_pages:
        lines.append(host_pages_line(page, settings))
    if settings.verify_rows:
        values = sum(layer.verify_values for layer in layers)
        why = f"{counted(settings.verify_rows, 'row')} x {values} values of recurrent layers, f32"
        lines.append(Line("verify_scratch", verify_bytes(layers, settings), why))
    if guesses:
        lines += mtp_lines(model, settings)
    if draft is not None:
        lines += draft_lines(draft, settings)
    if ends:
        head = head_bytes(model, settings)
        lines.append(Line("head", head, f"{model.vocab} x {model.hidden}, {settings.weights}"))
        lines.append(_logits_line(model, device, settings))
    if device.kind in ("cuda", "hip"):
        lines.append(_graphs_line(model, layers, device, settings))
    return lines


def snapshots_line(size: int, settings: PlanSettings) -> Line:
    """Return the line of all snapshots that host memory has room for."""
    why = f"{counted(settings.snapshots, 'snapshot')} of recurrent states and windows"
    return Line("snapshots", size, why)


def host_pages_line(each: int, settings: PlanSettings) -> Line:
    """Return the line of the pages of kept prefixes that host memory has room for."""
    why = f"{counted(settings.host_pages, 'page')} of kept prefixes, {settings.page_size} tokens"
    return Line("host_pages", settings.host_pages * each, why)


def _logits_line(model: ModelShape, device: DeviceSpec, settings: PlanSettings) -> Line:
    rows, vocab = logits_rows(settings), model.vocab
    size, why = rows * vocab * F32_BYTES, f"{counted(rows, 'row')} x {vocab}, f32"
    if device.kind != "cpu":  # a GPU draws tokens itself, whichever kernels run its layers
        drawing = sampler_bytes(DECODE_ROWS, vocab)
        size, why = size + drawing, f"{why}, and {gib(drawing)} to draw tokens with"
    return Line("logits", size, why)


def graph_parts(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> dict[str, int]:
    """Return the bytes of captured steps and of libraries' own allocations, by what they are."""
    inputs = inputs_bytes(settings.rows, settings.parallel, settings.sequence_pages)
    graphs = NO_GRAPHS if device.kind == "hip" else GPU_GRAPHS
    if settings.uses_arena:
        library = library_bytes(layers, device_step(model.hidden, settings), device.sm)
        libraries = "torch and cuBLAS in a step"
    else:  # without fused kernels torch allocates for each operation
        library, libraries = GPU_EAGER.bytes, GPU_EAGER.source
    return {graphs.source: graphs.bytes, "inputs of steps": inputs, libraries: library}


def _graphs_line(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> Line:
    parts = graph_parts(model, layers, device, settings)
    why = ", ".join(f"{gib(size)} for {what}" for what, size in parts.items())
    return Line("graphs", sum(parts.values()), why)


def draft_lines(draft: ModelShape, settings: PlanSettings) -> list[Line]:
    """Return the lines of a draft model; it uses the target's embedding and head."""
    weights = core_bytes(draft.layers, settings) + norm_bytes(draft, settings)
    cache = sum(draft_kv_bytes(layer, settings) for layer in draft.layers)
    rows, kinds = settings.rows, f"keys {settings.k_type}, values {settings.v_type}"
    state = f"{counted(rows, 'row')} of projected features x {draft.hidden} values, f32"
    return [
        Line("draft_weights", weights, f"{counted(len(draft.layers), 'layer')} of {draft.name}"),
        Line("draft_kv", cache, f"{settings.cache_tokens} tokens and those to guess, {kinds}"),
        Line("draft_state", rows * draft.hidden * F32_BYTES, state),
    ]


def draft_kv_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return the bytes of a draft layer's KV pages, with those for what it guesses."""
    pages = settings.window_pages(layer.window) if layer.kind == "window" else settings.draft_pages
    token = kv_token_bytes(layer, settings.k_type, settings.v_type)
    return pages * settings.page_size * token


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """The buffers of rows that one stage has: of the residual stream, and for hand-overs."""

    stream: int  # of the residual stream, f32
    side_values: int  # per-layer inputs of a row, of its layers and all after them, f32
    handover: int  # in the hand-over type, where that is narrower than f32
    # Of a worker, in host memory: rows from the worker before, and twice rows for the one after.
    received: int = 0
    sent: int = 0

    @classmethod
    def of(
        cls, model: ModelShape, layer_range: LayerRange, settings: PlanSettings
    ) -> "StageBuffers":
        """Return the buffers of a stage with a range of layers."""
        place = StagePlace.of(layer_range, len(model.layers))
        embedded = model.staging_buffers - 2  # the stream before the first layer, in some families
        return cls(
            stream=1 + place.ends + (embedded if place.begins else 0),
            side_values=sum(layer.side_width for layer in model.layers[layer_range.first :]),
            handover=0 if settings.handover_type == "f32" else place.neighbours,
            received=int(settings.worker and not place.begins),
            sent=WORKER_SENDS if settings.worker and not place.ends else 0,
        )

    def link_bytes(self, model: ModelShape, layer_range: LayerRange, settings: PlanSettings) -> int:
        """Return the bytes of the buffers between a worker and the workers beside it."""
        stream = type_bytes(settings.handover_type, model.hidden)
        later = sum(layer.side_width for layer in model.layers[layer_range.last + 1 :])
        received = self.received * (stream + self.side_values * F32_BYTES)
        return settings.rows * (received + self.sent * (stream + later * F32_BYTES))


def staging_line(model: ModelShape, layer_range: LayerRange, settings: PlanSettings) -> Line:
    """Return the buffers that carry rows between layers, and to or from neighbouring devices.

    The residual stream is f32 whatever the kernels compute in. A device with a neighbour before
    or after it has one more buffer for each where rows are handed over in a narrower type.
    """
    rows, hidden = settings.stream_rows, model.hidden
    buffers = StageBuffers.of(model, layer_range, settings)
    size = staging_bytes(hidden, rows, "f32", buffers.stream)
    why = f"{counted(buffers.stream, 'buffer')} x {counted(rows, 'row')} x {hidden} values, f32"
    if buffers.side_values:
        size += rows * buffers.side_values * F32_BYTES
        why += f", and {buffers.side_values} values a row as per-layer inputs, f32"
    if buffers.handover:
        size += staging_bytes(hidden, rows, settings.handover_type, buffers.handover)
        why += f", and {buffers.handover} to hand rows over in {settings.handover_type}"
    if links := buffers.link_bytes(model, layer_range, settings):
        size += links
        why += f", and {gib(links)} for rows from and to other workers"
    return Line("staging", size, why)


def workspace_line(
    model: ModelShape,
    layers: Sequence[LayerShape],
    device: DeviceSpec,
    settings: PlanSettings,
    request: PlanRequest,
) -> Line:
    """Return the scratch of a step over a range of layers, by our formula or the published one."""
    if request.published_activation:
        value_bytes = int(BY_NAME[settings.v_type].bytes_for(32) / 32)
        published = published_activation(
            model.hidden, model.ffn_width, settings.parallel, value_bytes, device.kind != "cpu"
        )
        return Line("workspace", published.bytes, published.why)
    phases = workspace_phases(model, layers, device, settings)
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in phases.items())
    why = f"the largest phase of a step of {counted(settings.rows, 'row')}: {sizes}"
    return Line("workspace", max(phases.values()), why)


def _memory_lines(layers: Sequence[LayerShape], settings: PlanSettings) -> list[Line]:
    """Return the lines of the layers' KV pages and recurrent state."""
    full = sum(1 for layer in layers if layer.kind == "full" and layer.owns_kv)
    windows = sum(1 for layer in layers if layer.kind == "window" and layer.owns_kv)
    pages = counted(settings.pages, "page")
    why = f"{counted(full, 'layer')} x {pages} of {settings.page_size} tokens"
    if windows:
        window = max(layer.window for layer in layers)
        pages = counted(settings.window_pages(window), "page")
        why += f", {counted(windows, 'window layer')} x {pages}"
    why += f", keys {settings.k_type}, values {settings.v_type}"
    state = sum(recurrent_bytes(layer, settings) for layer in layers)
    recurrent = counted(sum(1 for layer in layers if layer.kind == "recurrent"), "layer")
    sequences = counted(settings.parallel, "sequence")
    return [
        Line("kv", sum(kv_bytes(layer, settings) for layer in layers), why),
        Line("recurrent_state", state, f"{sequences} x {recurrent}, f32"),
    ]


def runtime_lines(device: DeviceSpec) -> list[Line]:
    """Return the memory of a device that the engine does not allocate: libraries and reserve."""
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
