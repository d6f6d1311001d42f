"""Budget: the bytes of every line of a plan, each by a formula of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.machine.devices import DeviceSpec
from headroom.machine.precision import checked_row_bytes, type_bytes
from headroom.plan.device_scratch import NARROW_TYPES, DeviceStep, device_phases
from headroom.plan.experts import holds_cold
from headroom.plan.shape import LayerShape, ModelShape
from headroom.units import GIB

PAGE_SIZE = 64  # tokens per cache page
# The plain kernels' own steps: rows multiplied together, queries and keys scored together,
# weight values unpacked together.
ROW_TILE, QUERY_TILE, KEY_BLOCK, UNPACK_VALUES = 16, 8, 128, 4 << 20
NATIVE_KEY_BLOCK = 256  # keys that the C++ attention sums up at a time
F32_BYTES = 4
TREE_NODES = 32  # most tokens that a draft proposes at once
NOT_ALLOCATED = frozenset({"graphs", "runtime", "reserve"})  # lines the engine does not allocate


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of a plan."""

    name: str  # a stable word of the plan's JSON
    bytes: int
    why: str  # how the number came about


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """All settings that memory depends on, none left open."""

    context: int  # tokens one sequence may hold
    parallel: int  # sequences worked on together
    chunk: int  # prompt tokens of one step
    cache_tokens: int  # tokens of all sequences together, whole pages
    page_size: int = PAGE_SIZE
    k_type: str
    v_type: str
    dtype: str  # type that matrix products compute in
    activation: str  # type of the staging buffers between layers and devices
    weights: str  # "packed" or "unpacked"
    threads: int
    pin_threads: bool = False  # each on a core of its own
    kernels: str = "reference"  # resolved: "cuda", "triton", "native" (C++) or "reference"
    unpack_bytes: int = 0  # most bytes of weights that a GPU unpacks at a time
    cold: str = "auto"  # who computes cold experts: "gpu", "cpu" or, by "drop", nobody
    pin_experts: bool = True  # cold ones, so that a GPU reads them where they lie
    keep_host_copy: bool = False  # of hot experts, too

    @property
    def rows(self) -> int:
        """Rows of the largest step: one prompt chunk and one token of every sequence."""
        return self.chunk + self.parallel

    @property
    def stream_rows(self) -> int:
        """Rows of the residual stream: a captured step may have more than a small chunk."""
        return max(self.rows, DECODE_ROWS) if self.kernels == "cuda" else self.rows

    @property
    def uses_arena(self) -> bool:
        """Whether a GPU's fused kernels run the layers; their scratch is one piece of memory."""
        return self.kernels == "cuda" and self.dtype in NARROW_TYPES

    @property
    def holds_cold(self) -> bool:
        """Whether host memory holds cold experts."""
        return holds_cold(self.cold, self.keep_host_copy)

    @property
    def expert_unpack_bytes(self) -> int:
        """What a GPU unpacks of cold experts at a time; 0 where its kernels unpack nothing."""
        return self.unpack_bytes if self.uses_arena else 0

    @property
    def pages(self) -> int:
        """Pages of each layer that sees the whole context."""
        return self.cache_tokens // self.page_size

    @property
    def sequence_pages(self) -> int:
        """Pages of one sequence that fills the context."""
        return pages_for(self.context)

    def window_pages(self, window: int) -> int:
        """Return the pages of each layer with a window; older pages are used again.

        Every sequence that may run has its own, one more than the window and a chunk need, since
        neither starts at a page's edge.
        """
        per_sequence = pages_for(window + self.chunk) + 1
        return self.parallel * min(self.sequence_pages, per_sequence)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user asked of a plan beside its settings."""

    split: tuple[float, ...] = ()  # share of layers for each device; empty: by balance
    expert_bytes: int | None = None  # most bytes of hot experts; None: as many as fit
    published_activation: bool = False
    draft: ModelShape | None = None
    feature_type: str = "f32"
    snapshot_bytes: int = 0  # host memory for saved prefixes
    pin: bool = True  # the memory of cold experts
    keep_copy: bool = False  # of hot experts in host memory


def pages_for(tokens: int) -> int:
    """Return the pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)


def held_bytes(packed: int, values: int, float_values: int, settings: PlanSettings) -> int:
    """Return the bytes of a weight as it is held: packed as in the file, or one type for all."""
    if settings.weights == "packed":
        return packed
    matrices = type_bytes(settings.dtype, values - float_values)
    return matrices + float_values * F32_BYTES


def core_bytes(layers: Sequence[LayerShape], settings: PlanSettings) -> int:
    """Return the bytes of the layers' weights without their routed experts."""
    return sum(
        held_bytes(layer.core_bytes, layer.core_values, layer.float_values, settings)
        for layer in layers
    )


def norm_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of the final norm, which stands beside the head, and of other parts."""
    floats = model.norm_values - model.norm_matrix_values
    return held_bytes(model.norm_bytes, model.norm_values, floats, settings)


def embed_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of the token table."""
    return held_bytes(model.embed_bytes, model.embed_values, 0, settings)


def lookup_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of tables beside the token table; only rows of them are ever read."""
    return held_bytes(model.lookup_bytes, model.lookup_values, 0, settings)


def head_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of a head that is not the token table."""
    return held_bytes(model.head_bytes, model.head_values, 0, settings)


def kv_token_bytes(layer: LayerShape, k_type: str, v_type: str) -> int:
    """Return the bytes that one token adds to a layer's own cache."""
    if layer.kv_values == (0, 0):
        return 0
    key = checked_row_bytes(k_type, layer.key_dim, "A key head")
    value = checked_row_bytes(v_type, layer.value_dim, "A value head")
    return layer.kv_heads * (key + value)


def kv_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return the bytes of a layer's pages, by its kind."""
    pages = settings.window_pages(layer.window) if layer.kind == "window" else settings.pages
    token = kv_token_bytes(layer, settings.k_type, settings.v_type)
    return pages * settings.page_size * token


def recurrent_bytes(layer: LayerShape, settings: PlanSettings) -> int:
    """Return the bytes of a layer's recurrent state and convolution inputs, always f32."""
    return settings.parallel * (layer.state_values + layer.conv_values) * F32_BYTES


def logits_rows(settings: PlanSettings, rules: Rules) -> int:
    """Return the rows that get logits in one step: one a sequence, or one a tree node.

    Every row of a captured step has them.
    """
    rows = settings.parallel * (1 if rules.draft is None else 1 + TREE_NODES)
    return max(rows, DECODE_ROWS) if settings.kernels == "cuda" else rows


def snapshot_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of one saved prefix of a whole context: its pages, state and logits."""
    total = model.vocab * F32_BYTES
    for layer in model.layers:
        seen = min(settings.context, layer.window) if layer.window else settings.context
        token = kv_token_bytes(layer, settings.k_type, settings.v_type)
        total += pages_for(seen) * settings.page_size * token
        total += (layer.state_values + layer.conv_values) * F32_BYTES
    return total


def verify_bytes(layers: Sequence[LayerShape], settings: PlanSettings) -> int:
    """Return the bytes of what recurrent layers keep for every node of a draft tree, f32."""
    values = sum(layer.verify_values for layer in layers)
    return settings.parallel * TREE_NODES * values * F32_BYTES


def published_activation_bytes(
    hidden: int, ffn_width: int, batch: int, kv_value_bytes: int, graphs: bool = False
) -> int:
    """Return the activation reserve of one device by the published formula.

    8 x rows x width x 2 bytes with at least 8192 rows, at most the older flat reserve of 30 GiB
    over the bytes of a cached value, and 2 GiB more where graphs are captured.
    """
    flat = 30 // max(1, kv_value_bytes) * GIB
    width = max(hidden, ffn_width)
    scaled = 8 * max(batch, 8192) * width * 2 if width > 0 else flat
    return min(scaled, flat) + (2 * GIB if graphs else 0)


def workspace_phases(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> dict[str, int]:
    """Return the scratch of each phase of a step; they follow each other, so the largest counts.

    All row buffers are f32; the residual stream and its normed copy are staging, not scratch.
    Checked 2026-11-15 on SmolLM2 with the plain kernels on x86-64: measured peaks of a step were 9
    to 12% below staging, logits and this line together with unpacked weights, 35 to 36% with
    packed ones, whose scratch is counted for the type that needs most.
    """
    if settings.uses_arena:
        return device_phases(layers, device_step(model.hidden, settings))
    if settings.kernels == "native":
        scratch = {
            "layer": max(native_layer_scratch(model.hidden, layer, settings) for layer in layers)
        }
        if any(layer.experts for layer in layers):
            scratch["experts"] = max(
                native_experts_scratch(model.hidden, layer, settings) for layer in layers
            )
        return scratch
    # Plain kernels keep more copies than a GPU's own.
    plain = device.kind == "cpu" or settings.kernels == "reference"
    row = F32_BYTES * settings.rows
    phases = {
        "mixer": row * max(mixer_width(layer, plain) for layer in layers),
        "feed-forward": row * (2 + 2 * plain) * max(ffn_width(layer) for layer in layers),
    }
    if not plain:
        phases["feed-forward"] += 2 * max(layer.expert_bytes for layer in layers)  # on their way
        return phases
    # The answers of all experts of a row stand side by side until they are summed up.
    phases["feed-forward"] += row * model.hidden * max(layer.experts_used for layer in layers)
    phases["mixer"] += KEY_BLOCK * F32_BYTES * 2 * max(sum(layer.kv_values) for layer in layers)
    padded = -(-settings.parallel // ROW_TILE) * ROW_TILE
    phases["head"] = 2 * padded * model.vocab * F32_BYTES
    if settings.weights == "packed" or settings.dtype != "f32":
        widest = max(model.hidden, *(ffn_width(layer) for layer in layers))
        phases["feed-forward"] += _unpacking(model.hidden * widest)
        phases["head"] += _unpacking(model.hidden * model.vocab)
    return phases


def device_step(hidden: int, settings: PlanSettings) -> DeviceStep:
    """Return what the scratch of a GPU's step depends on."""
    return DeviceStep(
        hidden=hidden,
        rows=settings.rows,
        spans=settings.parallel + 1,
        context=settings.context,
        unpack_bytes=settings.unpack_bytes,
        halves=settings.dtype == "f16",
    )


def native_layer_scratch(hidden: int, layer: LayerShape, settings: PlanSettings) -> int:
    """Return the scratch of one layer in the C++ kernels: the same sum as in native/ops.cpp.

    Rows of f32, their copies rounded to 8 bits with scales and sums, and the partial results of
    attention for every sequence that decodes at a full context.
    """
    rows, heads = settings.rows, layer.query_heads
    queries, keys, values = heads * layer.key_dim, *layer.kv_values
    floats = sum(
        _aligned(F32_BYTES * rows * width)
        for width in (hidden, queries, queries, keys, values, layer.ffn_width)
    )
    rounded = sum(_rounded(rows, width) for width in (hidden, hidden, queries, layer.ffn_width))
    blocks = -(-settings.context // NATIVE_KEY_BLOCK)
    partial = _aligned(F32_BYTES * blocks * heads * (-(-layer.value_dim // 16) * 16 + 2))
    return floats + rounded + settings.parallel * partial


def native_experts_scratch(hidden: int, layer: LayerShape, settings: PlanSettings) -> int:
    """Return the scratch of experts in the C++ kernels: the same sum as in native/ops.cpp.

    Each row is there once for every expert that it visits, as f32 and rounded to 8 bits.
    """
    picks = settings.rows * layer.experts_used
    orders = _aligned(4 * (layer.experts + 1)) + 2 * _aligned(4 * picks)
    return orders + sum(
        _aligned(F32_BYTES * picks * width) + _rounded(picks, width)
        for width in (hidden, layer.expert_width)
    )


def _rounded(rows: int, width: int) -> int:
    """Return the bytes of rows rounded to 8 bits, with the scales and sums of their blocks."""
    return (
        _aligned(rows * width)
        + _aligned(4 * rows * (width // 32))
        + _aligned(4 * rows * (width // 16))
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64


def _unpacking(values: int) -> int:
    """Return the scratch of unpacking a weight part by part.

    Of each value there are the last part's f32 and what the next part needs on its way, 6 to 13.3
    bytes by type (measured 2026-11-15 on the plain decoders; mxfp4 needs most).
    """
    return 18 * min(values, UNPACK_VALUES)


def mixer_width(layer: LayerShape, plain: bool) -> int:
    """Return the values of one row inside the mixer, all held at once.

    Fused attention holds queries, keys, values and output. The plain kernel also holds queries in
    tiles, two partial sums, three copies of the scores of one block of keys, two masks of them,
    and the block itself once for every tile of queries.
    """
    if layer.kind == "recurrent":
        return layer.mixer_width
    queries, output = layer.query_heads * layer.key_dim, layer.query_heads * layer.value_dim
    fused = queries + layer.kv_heads * (layer.key_dim + layer.value_dim) + output
    if not plain:
        return fused
    scores = layer.query_heads * KEY_BLOCK
    masks = -(-layer.query_heads // max(1, layer.kv_heads)) * KEY_BLOCK * 2 // F32_BYTES
    block = layer.kv_heads * max(layer.key_dim, layer.value_dim) * KEY_BLOCK // QUERY_TILE
    return fused + queries + 2 * output + 3 * scores + masks + block


def ffn_width(layer: LayerShape) -> int:
    """Return the values between up and down of one row: the dense part and its experts."""
    return layer.ffn_width + layer.experts_used * layer.expert_width
