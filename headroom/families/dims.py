"""Dims: the sizes of a model, and the helpers by which families read them from a header."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headroom.errors import ModelError
from headroom.formats.header import ModelHeader

LayerKind = Literal["full", "window", "recurrent"]
Tensors = dict[str, tuple[int, ...]]  # shapes by name, rows first

FUSED_EXPERTS = "ffn.experts.gate_up"
MAX_LAYERS, MAX_SIZE = 2048, 1 << 31
# How config.json names the kinds of layers.
KIND_NAMES: dict[str, LayerKind] = {
    "full_attention": "full", "sliding_attention": "window", "linear_attention": "recurrent",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The dimensions of one model; a family fills in those that its layers have."""

    architecture: str
    layers: int
    hidden: int
    vocab: int
    context: int
    tied: bool = False
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    ffn_by_layer: tuple[int, ...] = ()  # if layers differ
    experts: int = 0
    experts_used: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # first layers without experts
    fused_experts: bool = False  # gate and up of all experts lie in one tensor
    kinds: tuple[LayerKind, ...] = ()  # of every layer; empty: all see the whole context
    window: int = 0
    window_heads: int = 0  # query heads of window layers, if they differ
    full_kv_heads: int = 0  # heads of full layers, if they differ
    full_head_dim: int = 0
    shared_kv_layers: int = 0  # last layers that read the cache of others
    keys_are_values: bool = False  # full layers have no value projection
    normed_heads: bool = False  # queries and keys are normed, where models of a family differ
    gate_each_value: bool = False  # there is one output gate per value, not per head
    per_layer_width: int = 0  # values of a token's per-layer input of one layer
    state_heads: int = 0  # value heads of recurrent layers
    state_key_heads: int = 16
    state_dim: int = 128  # of their keys and values
    conv: int = 4  # tokens that their convolution sees
    taps: int = 0  # target layers that a draft reads
    block: int = 0  # tokens of a draft's block: the last known one, and those to guess
    mtp: bool = False  # a layer behind the model's own predicts further ahead
    mtp_fused: bool = False  # gate and up of that layer's experts lie in one tensor
    # Why such a layer of the file does not run; "" if it does, or if there is none.
    mtp_refused: str = field(default="", compare=False)
    # Why `context` is shorter than the file's, for error texts; "" if it is not.
    context_end: str = field(default="", compare=False)

    def kind(self, index: int) -> LayerKind:
        """Return the kind of a layer; one behind the model's own sees the whole context."""
        return self.kinds[index] if index < len(self.kinds) else "full"

    def ffn_width(self, index: int) -> int:
        """Return the width of a layer's dense feed-forward part."""
        return self.ffn_by_layer[index] if self.ffn_by_layer else self.ffn

    @property
    def state_width(self) -> int:
        """Values of all value heads of a recurrent layer."""
        return self.state_heads * self.state_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a recurrent layer's convolution: queries, keys and values."""
        return 2 * self.state_key_heads * self.state_dim + self.state_width


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDims:
    """The weights of one layer, and what the planner must know about its mixer."""

    tensors: Tensors  # by GGUF's names without "blk.N."
    kind: LayerKind = "full"
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    owns_kv: bool = True
    keys_are_values: bool = False  # there is no value projection
    gate_width: int = 0  # output gates of one row of attention
    gate_in_queries: bool = False  # the query matrix computes the gates, too; else a separate one
    ffn: int = 0
    shared_gate: bool = False  # the router scores the shared expert, too
    post_norms: bool = False  # the output of its parts is normed before it is added
    per_layer_width: int = 0  # values of a token's per-layer input; 0: it has none
    state_heads: int = 0


def pattern(layers: int, every: int, other: LayerKind, offset: int = 1) -> tuple[LayerKind, ...]:
    """Return the kinds of layers, one in `every` full: layer i if `every` divides i + offset."""
    return tuple("full" if (index + offset) % every == 0 else other for index in range(layers))


@dataclass(frozen=True, slots=True)
class Facts:
    """Reads a header's numbers, and checks each of them before sizes are computed from it."""

    header: ModelHeader

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the value of the first of `keys` that is set, checked to be at least `least`.

        If none is set, return the default, which is not checked.
        """
        metadata = self.header.metadata
        key = next((key for key in keys if key in metadata), keys[0])
        if key not in metadata and default is not None:
            return default
        return self.checked(key, metadata.get_int(key), least)

    def sizes(self, key: str, count: int, default: int | None = None) -> tuple[int, ...]:
        """Return one number for each layer; a single number in the file stands for all layers."""
        given = None if default is None else [default] * count
        numbers = self.header.metadata.get_ints(key, given, count=count)
        return tuple(self.checked(key, number, 0) for number in numbers)

    def flag(self, key: str) -> bool:
        """Return a setting that is true or false; false where it is not set."""
        return self.header.metadata.get_bool(key, False)

    def entries(self, key: str, count: int) -> Sequence[Any] | None:
        """Return a list of one entry for each layer, or None where the key is not set.

        A file's list may also have entries for layers that predict further ahead.
        """
        value = self.header.metadata.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.wrong(f"{key} is not a list of {count} entries")
        if len(value) not in (count, max(count, self.size("block_count"))):
            raise self.wrong(f"{key} is not a list of {count} entries")
        return value[:count]

    def checked(self, key: str, value: object, least: int = 1) -> int:
        """Return a number that is whole and in range."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(f"{key} is not a whole number")
        if not least <= value < MAX_SIZE:
            raise self.wrong(f"{key} is {value}; it must be {least} to {MAX_SIZE - 1}")
        return value

    def wrong(self, message: str) -> ModelError:
        """Return the error for a setting that no model can have; it begins with the file."""
        return ModelError(f"{self.header.metadata.path}: {message}.")

    def has(self, *endings: str) -> bool:
        """Whether the name of any tensor ends in one of `endings`."""
        return any(name.endswith(endings) for name in self.header.tensors)

    def rows(self, name: str) -> int | None:
        """Return the rows of a tensor, or None where the file has no such tensor."""
        info = self.header.tensors.get(name)
        return info.shape[0] if info is not None and info.shape else None

    @property
    def layers(self) -> int:
        """The layers of the model, without extra ones that predict further ahead."""
        layers = self.size("block_count") - self.size("nextn_predict_layers", default=0, least=0)
        if not 1 <= layers <= MAX_LAYERS:
            raise self.wrong(f"there are {layers} layers, not 1 to {MAX_LAYERS}")
        return layers


def common_dims(facts: Facts, **more: Any) -> Dims:
    """Return the dimensions that all families have, and `more`, which come first."""
    hidden = facts.size("embedding_length")
    values: dict[str, Any] = {
        "architecture": facts.header.architecture,
        "layers": facts.layers,
        "hidden": hidden,
        "tied": facts.header.metadata.tied,
    }
    if "context" not in more:
        values["context"] = facts.size("context_length")
    if "vocab" not in more:
        values["vocab"] = facts.rows("embed") or facts.size("vocab_size")
    if "heads" not in more:
        heads = facts.size("attention.head_count")
        values |= {
            "heads": heads,
            "kv_heads": facts.size("attention.head_count_kv", default=heads),
            "head_dim": facts.size("attention.key_length", default=max(1, hidden // heads)),
        }
    return Dims(**(values | more))


def mtp_dims(facts: Facts, parts: Sequence[str]) -> dict[str, Any]:
    """Return whether a file has a layer that predicts further ahead, and why it does not run.

    `parts` are tensors of that layer by our names. Settings may promise a layer that is not there.
    """
    count = facts.size("nextn_predict_layers", "hf.mtp_num_hidden_layers", default=0, least=0)
    if not count:
        return {}
    if not facts.header.tensors:
        return {"mtp": count == 1}
    before = f"layers.{facts.layers}."
    if not any(name.startswith(before) for name in facts.header.tensors):
        return {}
    missing = [name for name in parts if before + name not in facts.header.tensors]
    unread = [name for name in ("mtp.embed", "mtp.head") if before + name in facts.header.tensors]
    if count > 1:
        return {"mtp_refused": f"there are {count} of them, and one is supported"}
    if missing:
        return {"mtp_refused": f"it has no tensor {before}{missing[0]}"}
    if unread:
        return {"mtp_refused": f"it has an embedding or a head of its own, {before}{unread[0]}"}
    return {"mtp": True, "mtp_fused": f"{before}{FUSED_EXPERTS}" in facts.header.tensors}


def expert_dims(
    facts: Facts,
    *,
    shared: bool = False,
    used_key: str = "expert_used_count",
    width_keys: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the dimensions of routed experts; an empty dict where the model has none.

    `used_key` names the setting that says how many experts a token visits, `width_keys` those that
    say how wide an expert is where `expert_feed_forward_length` is not set.
    """
    if not facts.size("expert_count", default=0, least=0):
        return {}
    found: dict[str, Any] = {
        "experts": facts.size("expert_count"),
        "experts_used": facts.size("expert_used_count", used_key),
        "expert_ffn": facts.size("expert_feed_forward_length", *width_keys),
        "fused_experts": any(
            f"layers.{index}.{FUSED_EXPERTS}" in facts.header.tensors
            for index in range(facts.layers)
        ),
    }
    if found["experts_used"] > found["experts"]:
        used, all_of_them = found["experts_used"], found["experts"]
        raise facts.wrong(f"a token visits {used} of {all_of_them} experts")
    if shared:
        found["shared_ffn"] = facts.size("expert_shared_feed_forward_length")
    return found


def named_kinds(facts: Facts) -> tuple[LayerKind, ...]:
    """Return the kinds of layers that a config.json names, or () where it names none."""
    names = facts.entries("hf.layer_types", facts.layers) or ()
    if unknown := [name for name in names if name not in KIND_NAMES]:
        raise facts.wrong(f"layer type {unknown[0]!r} is none of {', '.join(KIND_NAMES)}")
    return tuple(KIND_NAMES[name] for name in names)


def window_flags(facts: Facts, key: str) -> tuple[LayerKind, ...] | None:
    """Return the kinds by a GGUF list that is true for window layers; None where it is not set."""
    flags = facts.entries(key, facts.layers)
    return None if flags is None else tuple("window" if flag else "full" for flag in flags)
