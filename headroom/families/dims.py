"""Dimensions of a model from its header: one reader for each family, both formats alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headroom.errors import ModelError
from headroom.families.tables import Dims, LayerKind, pattern
from headroom.formats.header import ModelHeader

MAX_LAYERS, MAX_SIZE = 2048, 1 << 31
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full", "sliding_attention": "window", "linear_attention": "recurrent",
}  # fmt: skip


def read_dims(header: ModelHeader) -> Dims:
    """Return a model's dimensions, or say which families there are."""
    reader = READERS.get(header.architecture)
    if reader is None:
        raise ModelError(
            f"{header.name} is a {header.architecture!r} model, which cannot be planned.",
            hint=f"Families: {', '.join(READERS)}.",
        )
    return reader(_Facts(header))


@dataclass(frozen=True, slots=True)
class _Facts:
    """A header's numbers, each checked before anything is sized by it."""

    header: ModelHeader

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of several keys that is there; the default need not be in range."""
        metadata = self.header.metadata
        key = next((key for key in keys if key in metadata), keys[0])
        if key not in metadata and default is not None:
            return default
        return self.checked(key, metadata.get_int(key), least)

    def sizes(self, key: str, count: int, default: int | None = None) -> tuple[int, ...]:
        """Return one number for each layer; a single one stands for all."""
        given = None if default is None else [default] * count
        numbers = self.header.metadata.get_ints(key, given, count=count)
        return tuple(self.checked(key, number, 0) for number in numbers)

    def flag(self, key: str) -> bool:
        return self.header.metadata.get_bool(key, False)

    def list(self, key: str, count: int) -> Sequence[Any] | None:
        """Return one entry for each layer, or None where the key is not there."""
        value = self.header.metadata.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
            raise self.wrong(f"{key} is not a list of {count} entries")
        return value

    def checked(self, key: str, value: object, least: int = 1) -> int:
        """Return a number that is whole and in range."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(f"{key} is not a whole number")
        if not least <= value < MAX_SIZE:
            raise self.wrong(f"{key} is {value}; it must be {least} to {MAX_SIZE - 1}")
        return value

    def wrong(self, message: str) -> ModelError:
        return ModelError(f"{self.header.metadata.path}: {message}.")

    def has(self, *endings: str) -> bool:
        """Whether any tensor's name ends in one of these."""
        return any(name.endswith(endings) for name in self.header.tensors)

    def rows(self, name: str) -> int | None:
        """Return the rows of a tensor, if it is there."""
        info = self.header.tensors.get(name)
        return info.shape[0] if info is not None and info.shape else None

    @property
    def layers(self) -> int:
        layers = self.size("block_count") - self.size("nextn_predict_layers", default=0, least=0)
        if not 1 <= layers <= MAX_LAYERS:
            raise self.wrong(f"there are {layers} layers, not 1 to {MAX_LAYERS}")
        return layers


def _common(facts: _Facts, **more: Any) -> Dims:
    """Return what all families have, and `more`."""
    hidden = facts.size("embedding_length")
    values: dict[str, Any] = {
        "architecture": facts.header.architecture,
        "layers": facts.layers,
        "hidden": hidden,
        "context": facts.size("context_length"),
        "tied": facts.header.metadata.tied,
    }
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


def _experts(facts: _Facts, *, shared: bool = False) -> dict[str, Any]:
    """Return the keys of routed experts; none where the model has none."""
    if not facts.size("expert_count", default=0, least=0):
        return {}
    found: dict[str, Any] = {
        "experts": facts.size("expert_count"),
        "experts_used": facts.size("expert_used_count", "hf.top_k_experts"),
        "expert_ffn": facts.size("expert_feed_forward_length"),
        "fused_experts": facts.has(".ffn.experts.gate_up"),
    }
    if found["experts_used"] > found["experts"]:
        used, all_of_them = found["experts_used"], found["experts"]
        raise facts.wrong(f"a token visits {used} of {all_of_them} experts")
    if shared:
        found["shared_ffn"] = facts.size("expert_shared_feed_forward_length")
    return found


def _llama(facts: _Facts) -> Dims:
    return _common(facts, ffn=facts.size("feed_forward_length"))


def _qwen3(facts: _Facts) -> Dims:
    if experts := _experts(facts):
        return _common(facts, **experts)
    return _common(facts, ffn=facts.size("feed_forward_length"))


def _qwen35(facts: _Facts) -> Dims:
    experts = _experts(facts, shared=True)
    dense = {} if experts else {"ffn": facts.size("feed_forward_length")}
    state_dim = facts.size("ssm.state_size", "hf.linear_value_head_dim")
    key_dim = facts.size("hf.linear_key_head_dim", default=state_dim)
    if key_dim != state_dim:
        raise facts.wrong(f"keys of {key_dim} and values of {state_dim} values are not supported")
    return _common(
        facts,
        kinds=_qwen35_kinds(facts),
        state_heads=facts.size("ssm.time_step_rank", "hf.linear_num_value_heads"),
        state_key_heads=facts.size("ssm.group_count", "hf.linear_num_key_heads"),
        state_dim=state_dim,
        conv=facts.size("ssm.conv_kernel", "hf.linear_conv_kernel_dim"),
        **experts,
        **dense,
    )


def _qwen35_kinds(facts: _Facts) -> tuple[LayerKind, ...]:
    if named := _named_kinds(facts):
        return named
    if (flags := facts.list("attention.recurrent_layers", facts.layers)) is not None:
        return tuple("recurrent" if flag else "full" for flag in flags)
    every = facts.size("full_attention_interval", "hf.full_attention_interval", default=4)
    return pattern(facts.layers, every, "recurrent")


def _named_kinds(facts: _Facts) -> tuple[LayerKind, ...]:
    """Return the kinds that a config.json names, or nothing."""
    names = facts.list("hf.layer_types", facts.layers) or ()
    if unknown := [name for name in names if name not in _KINDS]:
        raise facts.wrong(f"layer type {unknown[0]!r} is none of {', '.join(_KINDS)}")
    return tuple(_KINDS[name] for name in names)


def _laguna(facts: _Facts) -> Dims:
    layers = facts.layers
    kinds = _named_kinds(facts) or _laguna_kinds(facts)
    key = "hf.num_attention_heads_per_layer"
    key = key if key in facts.header.metadata else "attention.head_count"
    heads = facts.sizes(key, layers)
    full = {count for count, kind in zip(heads, kinds, strict=True) if kind == "full"}
    window = {count for count, kind in zip(heads, kinds, strict=True) if kind != "full"}
    if len(full) > 1 or len(window) > 1:
        raise facts.wrong("layers of one kind have different numbers of heads")
    head_dim = facts.size("attention.key_length")
    full_heads = facts.checked("attention.head_count", max(full or window))
    gates = facts.rows("layers.0.attn.gate")
    return _common(
        facts,
        kinds=kinds,
        window=facts.size("attention.sliding_window") if window else 0,
        heads=full_heads,
        window_heads=facts.checked("attention.head_count", max(window or full)),
        kv_heads=facts.size("attention.head_count_kv"),
        head_dim=head_dim,
        gate_each_value=gates == full_heads * head_dim,
        ffn=facts.size("feed_forward_length"),
        dense_layers=_dense_layers(facts),
        **_experts(facts, shared=True),
    )


def _laguna_kinds(facts: _Facts) -> tuple[LayerKind, ...]:
    """Return the kinds by GGUF's keys; files of models without windows have none of them."""
    if not facts.size("attention.sliding_window", default=0, least=0):
        return pattern(facts.layers, 1, "window")
    key = "attention.sliding_window_pattern"
    if isinstance(facts.header.metadata.values.get(key, 4), int):
        return pattern(facts.layers, facts.size(key, default=4), "window", 0)
    flags = facts.list(key, facts.layers) or ()
    return tuple("window" if flag else "full" for flag in flags)


def _dense_layers(facts: _Facts) -> int:
    names = facts.list("hf.mlp_layer_types", facts.layers)
    if names is None:
        return facts.size("leading_dense_block_count", default=1, least=0)
    dense = sum(1 for name in names if name == "dense")
    if any(name == "dense" for name in names[dense:]):
        raise facts.wrong("dense layers stand between layers of experts")
    return dense


def _gemma4(facts: _Facts) -> Dims:
    layers = facts.layers
    kinds = _gemma4_kinds(facts)
    full = kinds.index("full") if "full" in kinds else -1
    window = kinds.index("window") if "window" in kinds else full
    head_dim, full_dim, kv_heads, full_kv_heads = _gemma4_heads(facts, full, window)
    ffn = facts.sizes("feed_forward_length", layers)
    shared = facts.size("attention.shared_kv_layers", "hf.num_kv_shared_layers", default=0, least=0)
    if facts.flag("hf.use_double_wide_mlp"):
        ffn = tuple(width * (2 if i >= layers - shared else 1) for i, width in enumerate(ffn))
    side = facts.size("embedding_length_per_layer_input", "hf.hidden_size_per_layer_input",
                      default=0, least=0)  # fmt: skip
    experts = _experts(facts)
    return _common(
        facts,
        kinds=kinds,
        window=facts.size("attention.sliding_window"),
        heads=facts.size("attention.head_count"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        full_kv_heads=full_kv_heads,
        full_head_dim=full_dim,
        keys_are_values=_keys_are_values(facts, full),
        shared_kv_layers=min(shared, layers),
        side_width=side,
        ffn=max(ffn),
        ffn_by_layer=ffn if len(set(ffn)) > 1 else (),
        **({**experts, "fused_experts": not facts.has(".ffn.experts.gate")} if experts else {}),
    )


def _gemma4_kinds(facts: _Facts) -> tuple[LayerKind, ...]:
    if named := _named_kinds(facts):
        return named
    flags = facts.list("attention.sliding_window_pattern", facts.layers)
    if flags is not None:
        return tuple("window" if flag else "full" for flag in flags)
    return pattern(facts.layers, 6, "window")


def _gemma4_heads(facts: _Facts, full: int, window: int) -> tuple[int, int, int, int]:
    """Return head sizes and key heads of window layers and of full ones, whoever wrote them."""
    kv = facts.sizes("attention.head_count_kv", facts.layers)
    if "attention.key_length_swa" in facts.header.metadata:  # GGUF
        dims = facts.size("attention.key_length_swa"), facts.size("attention.key_length")
        return *dims, max(1, kv[window]), max(1, kv[full])
    own = _layer_overrides(facts, full)
    head_dim = facts.size("attention.key_length")
    full_dim = own.get("head_dim", facts.size("hf.global_head_dim", default=512))
    full_kv = own.get("num_key_value_heads", kv[full])
    if facts.flag("hf.attention_k_eq_v"):
        full_kv = facts.size("hf.num_global_key_value_heads", default=full_kv)
    return (
        head_dim,
        facts.checked("global_head_dim", full_dim),
        max(1, kv[window]),
        facts.checked("num_global_key_value_heads", full_kv),
    )


def _layer_overrides(facts: _Facts, index: int) -> Mapping[str, Any]:
    """Return what a config.json says of one layer alone; it pads the layers' numbers."""
    by_layer = facts.header.metadata.values.get("hf.per_layer_config")
    for key, value in by_layer.items() if isinstance(by_layer, Mapping) else ():
        if isinstance(value, Mapping) and str(key).isdigit() and int(key) == index:
            return value
    return {}


def _keys_are_values(facts: _Facts, full: int) -> bool:
    """Whether full layers have no values of their own; the tensors say so where they are known."""
    if facts.header.tensors and full >= 0:
        return f"layers.{full}.attn.v" not in facts.header.tensors
    return facts.flag("hf.attention_k_eq_v")


def _dflash(facts: _Facts) -> Dims:
    window = facts.size("attention.sliding_window", default=0, least=0)
    kinds = _named_kinds(facts)
    flags = facts.list("attention.sliding_window_pattern", facts.layers)
    if flags is not None:
        kinds = tuple("window" if flag else "full" for flag in flags)
    elif window and not kinds:
        kinds = pattern(facts.layers, facts.layers, "window")
    return _common(
        facts,
        ffn=facts.size("feed_forward_length"),
        vocab=facts.size("vocab_size", default=1),
        tied=False,  # it has neither embedding nor head
        kinds=kinds,
        window=window if "window" in kinds else 0,
        taps=_taps(facts),
    )


def _taps(facts: _Facts) -> int:
    """Return how many target layers a draft reads, by its projection or by its settings."""
    projection = facts.header.tensors.get("features.proj")
    if projection is not None:
        return max(1, projection.shape[-1] // facts.size("embedding_length"))
    settings = facts.header.metadata.values.get("hf.dflash_config")
    named = settings.get("target_layer_ids") if isinstance(settings, Mapping) else None
    return len(named) if isinstance(named, list) and named else facts.layers


READERS: dict[str, Callable[[_Facts], Dims]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "laguna": _laguna,
    "gemma4": _gemma4,
    "dflash": _dflash,
}
