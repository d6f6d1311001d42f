"""ModelShape: bytes and work per layer: everything that the planner knows about a model."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from headroom.families.dims import LayerKind

if TYPE_CHECKING:  # plans of known models read no files
    from pathlib import Path

    from headroom.formats.checkpoint import Checkpoint

F32_BYTES, BF16_BYTES = 4, 2  # of one value; f16 takes as much as bf16


class LayerRange(NamedTuple):
    """Consecutive layers that one device runs."""

    first: int
    last: int  # inclusive

    @property
    def size(self) -> int:
        """Layers in the range."""
        return self.last - self.first + 1

    @property
    def words(self) -> str:
        """The range for people: "layer 0" or "layers 0 to 39"."""
        if self.first == self.last:
            return f"layer {self.first}"
        return f"layers {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class Padding:
    """What kernels add to weights: zeros that fill whole panels or tiles."""

    bytes: int = 0  # of weights packed as in the file
    values: int = 0
    float_values: int = 0  # of `values`, those always kept in f32

    def plus(self, other: "Padding") -> "Padding":
        """Return what both add together."""
        return Padding(
            self.bytes + other.bytes,
            self.values + other.values,
            self.float_values + other.float_values,
        )


NO_PADDING = Padding()


@dataclass(frozen=True, slots=True)
class LayerPadding:
    """What a layout adds to one layer."""

    core: Padding = NO_PADDING
    expert_bytes: int = 0  # of one routed expert


@dataclass(frozen=True, slots=True)
class OuterPadding:
    """What a layout adds to the weights that belong to no layer."""

    embed: Padding = NO_PADDING
    head: Padding = NO_PADDING
    norm: Padding = NO_PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes of one layer: its weights, its cache and its state."""

    kind: LayerKind
    core_bytes: int  # all weights but the routed experts, packed as in the file
    core_values: int  # all weights but the routed experts, counted in values
    float_values: int = 0  # of core_values, those always kept in f32: norms, biases, routers
    query_heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0  # values of one key head
    value_dim: int = 0  # values of one value head
    window: int = 0  # tokens that a window layer sees; 0 for other kinds
    owns_kv: bool = True  # False: reads the cache of an earlier layer
    ffn_width: int = 0  # dense or shared part; values between up and down
    experts: int = 0  # routed experts
    experts_used: int = 0  # experts that one token visits
    expert_width: int = 0  # values between an expert's up and down
    expert_bytes: int = 0  # one routed expert, packed: gate, up and down
    expert_values: int = 0  # one routed expert, counted in values
    state_values: int = 0  # recurrent state of one sequence
    conv_values: int = 0  # convolution inputs that one sequence keeps
    mixer_width: int = 0  # values of one token inside a recurrent mixer, all held at once
    verify_values: int = 0  # values that a recurrent layer keeps of each row of guesses
    gate_width: int = 0  # gates of one row of attention
    # The query matrix computes the gates, too; else a separate matrix.
    gate_in_queries: bool = False
    keys_are_values: bool = False  # no matrix computes values
    shared_gate: bool = False  # the router scores the shared expert, too
    side_width: int = 0  # values of a token's per-layer input
    state_heads: int = 0  # value heads of a recurrent mixer
    post_norms: bool = False  # the output of its parts is normed before it is added
    panels: LayerPadding = LayerPadding()  # what C++ kernels add
    tiles: LayerPadding = LayerPadding()  # what a GPU's kernels add

    def padded(self, added: LayerPadding) -> "LayerShape":
        """Return the layer with the padding that kernels add to its weights."""
        core = added.core
        return replace(
            self,
            core_bytes=self.core_bytes + core.bytes,
            core_values=self.core_values + core.values,
            float_values=self.float_values + core.float_values,
            expert_bytes=self.expert_bytes + added.expert_bytes,
            panels=LayerPadding(),
            tiles=LayerPadding(),
        )

    @property
    def kv_values(self) -> tuple[int, int]:
        """The key and value elements that one token adds to this layer's own cache."""
        if self.kind == "recurrent" or not self.owns_kv:
            return 0, 0
        return self.kv_heads * self.key_dim, self.kv_heads * self.value_dim

    @property
    def projections(self) -> tuple[int, ...]:
        """The outputs of each matrix that reads attention's input: queries, keys, values, gates."""
        queries, (keys, values) = self.query_heads * self.key_dim, self.kv_values
        outputs = [
            queries + (self.gate_width if self.gate_in_queries else 0),
            keys,
            0 if self.keys_are_values else values,
            0 if self.gate_in_queries else self.gate_width,
        ]
        return tuple(width for width in outputs if width)

    @property
    def router_outputs(self) -> int:
        """The logits of one row."""
        return self.experts + self.shared_gate

    @property
    def all_expert_bytes(self) -> int:
        """The bytes of all routed experts of this layer."""
        return self.experts * self.expert_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model as the planner sees it: plain numbers, no tensors."""

    name: str
    architecture: str  # GGUF's name of the family
    hidden: int  # values of one token between layers
    vocab: int  # rows of the head
    context_limit: int  # most positions that an engine can run
    context_end: str = ""  # why that is less than the model was made for, if it is
    layers: tuple[LayerShape, ...]
    embed_bytes: int  # token table, packed as in the file
    embed_values: int
    embed_added: Padding = NO_PADDING  # of both, what a layout added because the table is the head
    head_bytes: int = 0  # 0 where the head is the token table
    head_values: int = 0
    lookup_bytes: int = 0  # other tables than the token table of which only rows are read
    lookup_values: int = 0
    norm_bytes: int = 0  # final norm and other weights that belong to no layer
    norm_values: int = 0
    norm_matrix_values: int = 0  # of norm_values, those not always kept in f32
    ffn_width: int = 0  # widest dense feed-forward layer
    staging_buffers: int = 2  # 3 where every layer reads the embedding again
    side_values: int = 0  # per-layer inputs of a token, for all layers together
    # The layer behind the others that predicts further ahead, with all its tensors; None: the file
    # has none, or `mtp_refused` says why it does not run.
    mtp: LayerShape | None = None
    mtp_refused: str = ""
    taps: int = 0  # of a draft: target layers whose outputs it reads
    tap_width: int = 0  # of a draft: values of one tapped output
    tap_layers: tuple[int, ...] = ()  # of a draft whose target is known: numbers of these layers
    block: int = 0  # of a draft: tokens of its block, the last known one and those to guess
    panels: OuterPadding = OuterPadding()  # what C++ kernels add
    tiles: OuterPadding = OuterPadding()  # what a GPU's kernels add
    packed: bool = True  # whether any matrix has values of fewer bits than f16
    # Types of matrices that no product reads as they lie in the file, and those of routed experts.
    unread_types: tuple[str, ...] = ()
    unread_expert_types: tuple[str, ...] = ()
    cpu_only: str = ""  # why no GPU runs the model; "" if GPUs run it

    def in_panels(self) -> "ModelShape":
        """Return the model as C++ kernels hold it."""
        layers = tuple(layer.padded(layer.panels) for layer in self.layers)
        mtp = None if self.mtp is None else self.mtp.padded(self.mtp.panels)
        return self._padded(layers, mtp, self.panels)

    def in_tiles(self) -> "ModelShape":
        """Return the model as a GPU's kernels hold it."""
        layers = tuple(layer.padded(layer.tiles) for layer in self.layers)
        mtp = None if self.mtp is None else self.mtp.padded(self.mtp.tiles)
        return self._padded(layers, mtp, self.tiles)

    def _padded(
        self, layers: tuple[LayerShape, ...], mtp: LayerShape | None, added: OuterPadding
    ) -> "ModelShape":
        embed, head, norm = added.embed, added.head, added.norm
        return replace(
            self,
            layers=layers,
            mtp=mtp,
            embed_bytes=self.embed_bytes + embed.bytes,
            embed_values=self.embed_values + embed.values,
            embed_added=self.embed_added.plus(embed),
            head_bytes=self.head_bytes + head.bytes,
            head_values=self.head_values + head.values,
            norm_bytes=self.norm_bytes + norm.bytes,
            norm_values=self.norm_values + norm.values,
            norm_matrix_values=self.norm_matrix_values + norm.values,
            panels=OuterPadding(),
            tiles=OuterPadding(),
        )

    @property
    def tied(self) -> bool:
        """Whether the head is the token table."""
        return self.head_values == 0

    @property
    def weight_bytes(self) -> int:
        """All weights that each token needs, packed: layers, experts, embedding, head and norm."""
        layers = sum(layer.core_bytes + layer.all_expert_bytes for layer in self.layers)
        return layers + self.norm_bytes + self.embed_bytes + self.head_bytes + self.lookup_bytes

    @property
    def total_experts(self) -> int:
        """Routed experts of all layers together."""
        return sum(layer.experts for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts of all layers, packed."""
        return sum(layer.all_expert_bytes for layer in self.layers)

    @property
    def window(self) -> int:
        """The widest window of any layer; 0 where every layer sees all."""
        return max((layer.window for layer in self.layers), default=0)


@dataclass(frozen=True, slots=True)
class PlanSource:
    """A model to plan: its shape, and the files on this disk that have exactly this shape."""

    shape: ModelShape
    checkpoint: "Checkpoint | None" = None  # None: a known name, another mix, a config.json, a URL

    @property
    def gguf_path(self) -> "Path | None":
        """The model's GGUF file, if it has one on this disk."""
        if self.checkpoint is None or self.checkpoint.format != "gguf":
            return None
        return self.checkpoint.path
