"""Recipe: all that decides a synthesised checkpoint but its types and its seed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headroom.errors import OptionError
from headroom.families.dims import read_dims
from headroom.families.known import KNOWN
from headroom.families.tables import LAYERS, Dims, pattern
from headroom.formats.header import ModelHeader, safetensors_header
from headroom.formats.safetensors import read_json

FAMILIES = tuple(LAYERS)
DRAFT_BLOCK = 16  # tokens that a draft fills in one pass
_TARGETS = {"qwen3.6-35b-a3b-dflash": 40, "gemma-4-31b-dflash": 60}  # layers; others have 64


@dataclass(frozen=True, slots=True)
class Yarn:
    """How the angles of full layers are stretched to a longer context."""

    factor: float
    original: int  # positions before stretching
    beta_fast: float
    attention_factor: float | None  # None: by the formula


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model's dimensions and the numbers of its arithmetic."""

    name: str
    dims: Dims
    eps: float = 1e-6
    theta: float = 1e6  # of full layers
    window_theta: float = 1e4  # of layers with a window, where it differs
    rope_dims: int  # of a full layer's head
    yarn: Yarn | None = None
    routed_scale: float = 1.0  # of the experts' sum
    softcap: float = 0.0  # of logits
    taps: tuple[int, ...] = ()  # target layers that a draft reads, from 0

    @property
    def family(self) -> str:
        """GGUF's name of the family."""
        return self.dims.architecture

    @property
    def sections(self) -> tuple[int, int, int]:
        """How the frequencies are shared out between time, height and width."""
        half = self.rope_dims // 2
        third = -(-half // 3)
        return third, third, half - 2 * third


_TINY: dict[str, Any] = {"hidden": 256, "vocab": 1024, "context": 4096}
_TINY_GEMMA = Dims(
    architecture="gemma4", layers=12, tied=True, heads=4, kv_heads=2, head_dim=64, ffn=512,
    kinds=pattern(12, 6, "window"), window=16, full_kv_heads=1, full_head_dim=128,
    keys_are_values=True, fused_experts=True, **_TINY,
)  # fmt: skip
_TINY_QWEN35 = Dims(
    architecture="qwen35", layers=8, heads=4, kv_heads=2, head_dim=64, ffn=512,
    kinds=pattern(8, 4, "recurrent"), state_heads=4, state_key_heads=2, state_dim=64, **_TINY,
)  # fmt: skip
_TINY_LAGUNA = Dims(
    architecture="laguna", layers=8, heads=4, window_heads=8, kv_heads=2, head_dim=64, ffn=512,
    kinds=pattern(8, 4, "window", 0), window=16, experts=16, experts_used=4, expert_ffn=256,
    shared_ffn=256, dense_layers=1, **_TINY,
)  # fmt: skip
_TINY_SIDE = replace(
    _TINY_GEMMA, full_kv_heads=2, keys_are_values=False, shared_kv_layers=6, side_width=64
)
# Small models for tests: every kind of layer, rows of whole 256-value blocks, short windows.
TINY: dict[str, dict[str, Dims]] = {
    "llama": {
        "tiny": Dims(
            architecture="llama", layers=4, tied=True, heads=4, kv_heads=2, head_dim=64, ffn=512,
            **_TINY,
        )
    },
    "qwen3": {
        "tiny": Dims(
            architecture="qwen3", layers=4, tied=True, heads=8, kv_heads=4, head_dim=64, ffn=512,
            **_TINY,
        )
    },
    "qwen3moe": {
        "tiny": Dims(
            architecture="qwen3moe", layers=4, heads=8, kv_heads=2, head_dim=64, experts=16,
            experts_used=4, expert_ffn=256, **_TINY,
        )
    },
    "qwen35": {"tiny": _TINY_QWEN35},
    "qwen35moe": {
        "tiny": replace(
            _TINY_QWEN35, architecture="qwen35moe", ffn=0, experts=16, experts_used=4,
            expert_ffn=256, shared_ffn=256,
        )
    },
    "laguna": {
        "tiny": _TINY_LAGUNA,
        "tiny-value-gate": replace(_TINY_LAGUNA, gate_each_value=True),
    },
    "gemma4": {
        "tiny": _TINY_GEMMA,
        "tiny-moe": replace(_TINY_GEMMA, experts=16, experts_used=4, expert_ffn=256),
        "tiny-e4b": _TINY_SIDE,
        "tiny-e2b": replace(
            _TINY_SIDE, layers=10, kinds=pattern(10, 5, "window"), shared_kv_layers=5,
            ffn=1024, ffn_by_layer=(512,) * 5 + (1024,) * 5,
        ),
    },
    "dflash": {
        "tiny": Dims(
            architecture="dflash", layers=2, heads=4, kv_heads=2, head_dim=64, ffn=512, taps=3,
            kinds=("window", "full"), window=16, **_TINY,
        )
    },
}  # fmt: skip


def sizes_of(family: str) -> dict[str, Dims]:
    """Return the sizes of a family by name: small ones for tests, then those of known models."""
    if family not in TINY:
        raise OptionError(
            f"{family!r} is no model family.", hint=f"Families: {', '.join(TINY)}.", param="family"
        )
    known = {name: dims for name, dims in KNOWN.items() if dims.architecture == family}
    return TINY[family] | known


def find_recipe(family: str, size: str, layers: int = 0) -> Recipe:
    """Return the recipe of a named size, cut to its first layers where a number is given."""
    sizes = sizes_of(family)
    if (dims := sizes.get(size.lower())) is None:
        raise OptionError(
            f"{size!r} is no size of {family}.", hint=f"Sizes: {', '.join(sizes)}.", param="size"
        )
    recipe = _with_constants(size.lower(), cut(dims, layers))
    if family != "dflash":
        return recipe
    targets = _TARGETS.get(size.lower(), 64 if dims.vocab > _TINY["vocab"] else 8)
    return replace(recipe, taps=draft_taps(dims.taps, targets))


def read_recipe(family: str, config: Path, layers: int = 0) -> Recipe:
    """Return the recipe of a config.json as transformers writes it."""
    header = safetensors_header(read_json(config), config, (), config.absolute().parent.name)
    if header.architecture != family:
        raise OptionError(
            f"{config} describes a {header.architecture!r} model, not {family!r}.", param="config"
        )
    dims = cut(_gated(read_dims(header), header), layers)
    recipe = _with_constants(header.name, dims)
    metadata = header.metadata
    recipe = _with_named_ropes(recipe, metadata.values.get("hf.rope_parameters"))
    share = metadata.get_float("rope.scaling.partial_rotary_factor", 0)
    return replace(
        recipe,
        eps=metadata.get_float("attention.layer_norm_rms_epsilon", recipe.eps),
        theta=metadata.get_float("rope.freq_base", recipe.theta),
        rope_dims=int(share * dims.head_dim) if share else recipe.rope_dims,
    )


def cut(dims: Dims, layers: int) -> Dims:
    """Return a model's first layers; the pattern stays, and sharers keep a layer to read from."""
    if not layers or layers == dims.layers:
        return dims
    if not 1 <= layers < dims.layers:
        raise OptionError(
            f"--layers is {layers}; the model has {dims.layers} layers.",
            hint=f"Choose 1 to {dims.layers}.",
            param="layers",
        )
    kinds = dims.kinds[:layers]
    if dims.architecture == "gemma4":  # whose last layer always sees all
        kinds = (*kinds[:-1], "full")
    period = dims.kinds.index("full") + 1 if "full" in dims.kinds else dims.layers
    shared = max(0, min(dims.shared_kv_layers, layers - period))
    widths = dims.ffn_by_layer
    if widths:
        widths = (min(widths),) * (layers - shared) + (max(widths),) * shared
    return replace(dims, layers=layers, kinds=kinds, shared_kv_layers=shared, ffn_by_layer=widths)


def draft_taps(count: int, target_layers: int) -> tuple[int, ...]:
    """Return the target layers that a draft of so many taps reads where nothing names them."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def _with_constants(name: str, dims: Dims) -> Recipe:
    """Return a model with its family's numbers, which files of that family have."""
    recipe = Recipe(name=name, dims=dims, rope_dims=dims.head_dim)
    match dims.architecture:
        case "llama":
            return replace(recipe, eps=1e-5, theta=1e5)
        case "qwen35" | "qwen35moe":
            return replace(recipe, theta=1e7, rope_dims=dims.head_dim // 4)
        case "laguna":
            return replace(
                recipe, theta=5e5, rope_dims=dims.head_dim // 2, yarn=_yarn(dims), routed_scale=2.5
            )
        case "gemma4":
            return replace(recipe, rope_dims=dims.full_head_dim, softcap=30.0)
        case "dflash":
            theta = 1e6 if dims.vocab == KNOWN["gemma-4-31b"].vocab else 1e7
            return replace(recipe, theta=theta, taps=tuple(range(1, dims.taps + 1)))
    return recipe


def _yarn(dims: Dims) -> Yarn:
    if dims.context > _TINY["context"]:
        return Yarn(32.0, dims.context // 32, 64.0, 1.0)
    # Programs differ in how they read the two last numbers; all agree on these.
    return Yarn(32.0, dims.context // 32, 32.0, None)


def _gated(dims: Dims, header: ModelHeader) -> Dims:
    each_value = header.metadata.values.get("hf.gating") == "per-element"
    return replace(dims, gate_each_value=each_value)


def _with_named_ropes(recipe: Recipe, ropes: object) -> Recipe:
    """Return the recipe with what a config.json says of each kind of layer."""
    if not isinstance(ropes, Mapping):
        return recipe
    full, window = ropes.get("full_attention", {}), ropes.get("sliding_attention", {})
    yarn = None
    if full.get("rope_type") == "yarn":
        yarn = Yarn(
            float(full["factor"]),
            int(full["original_max_position_embeddings"]),
            float(full.get("beta_fast", 32.0)),
            full.get("attention_factor"),
        )
    gemma = recipe.family == "gemma4"  # where frequencies stay in place and some are 0
    width = recipe.dims.full_head_dim if gemma else recipe.dims.head_dim
    share = 1.0 if gemma else full.get("partial_rotary_factor", 1.0)
    return replace(
        recipe,
        theta=float(full.get("rope_theta", recipe.theta)),
        window_theta=float(window.get("rope_theta", recipe.window_theta)),
        rope_dims=int(width * share),
        yarn=yarn,
    )
