"""Budget: the bytes of every line of a plan, each by a formula of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.memory.devices import DeviceSpec
from headroom.memory.precision import checked_row_bytes, type_bytes
from headroom.memory.shape import LayerShape, ModelShape
from headroom.units import GIB

PAGE_SIZE = 64  # tokens per cache page
# Kernels that unpack a weight before they multiply do it in tiles of at most this many values.
UNPACK_TILE_VALUES = 16 << 20
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

    @property
    def rows(self) -> int:
        """Rows of the largest step: one prompt chunk and one token of every sequence."""
        return self.chunk + self.parallel

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

        One page more than the window and a chunk need, since neither starts at a page's edge.
        """
        per_sequence = pages_for(window + self.chunk) + 1
        return min(self.pages, self.parallel * min(self.sequence_pages, per_sequence))


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user asked of a plan beside its settings."""

    split: tuple[float, ...] = ()  # share of layers for each device; empty: by balance
    expert_bytes: int | None = None  # most bytes of hot experts; None: as many as fit
    published_activation: bool = False
    draft: ModelShape | None = None
    feature_type: str = "f32"


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
    """Return the bytes of the final norm, which stands beside the head."""
    return held_bytes(model.norm_bytes, model.norm_values, model.norm_values, settings)


def embed_bytes(model: ModelShape, settings: PlanSettings) -> int:
    """Return the bytes of the token table."""
    return held_bytes(model.embed_bytes, model.embed_values, 0, settings)


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
    """Return the rows that get logits in one step: one a sequence, or one a tree node."""
    return settings.parallel * (1 if rules.draft is None else 1 + TREE_NODES)


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


def workspace_parts(
    model: ModelShape, layers: Sequence[LayerShape], device: DeviceSpec, settings: PlanSettings
) -> dict[str, int]:
    """Return the scratch of one step by purpose; layers run one after the other and share it.

    Row buffers are f32. Inside a layer the mixer's and the feed-forward part's buffers do not
    live at the same time, so the larger one counts.
    """
    row = F32_BYTES * settings.rows
    parts = {
        "normed input": row * model.hidden,
        "mixer or feed-forward": row * max(max(mixer_width(x), ffn_width(x)) for x in layers),
    }
    if device.kind == "cpu":  # plain kernels read a sequence's cache as one f32 array
        token = max(sum(layer.kv_values) for layer in layers)
        parts["keys and values of one sequence"] = settings.context * token * F32_BYTES
        parts["mask"] = settings.chunk * settings.context * F32_BYTES
        if settings.weights == "packed":
            widest = max(*(layer.ffn_width for layer in layers), model.hidden)
            parts["unpacked tile"] = min(model.hidden * widest, UNPACK_TILE_VALUES) * F32_BYTES
    elif expert := max(layer.expert_bytes for layer in layers):
        parts["two cold experts on their way"] = 2 * expert
    return parts


def mixer_width(layer: LayerShape) -> int:
    """Return the values of one row inside the mixer: queries, keys, values, output."""
    if layer.kind == "recurrent":
        return layer.mixer_width
    per_head = layer.key_dim + layer.value_dim
    return (layer.query_heads + layer.kv_heads) * per_head


def ffn_width(layer: LayerShape) -> int:
    """Return the values of one row inside the feed-forward part: gate and up, experts as well."""
    return 2 * (layer.ffn_width + layer.experts_used * layer.expert_width)
