"""Tensor names: what GGUF and safetensors call a tensor, and the one name used here.

Most families share the names below. What one family names differently comes as data: a Naming.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Format = Literal["gguf", "safetensors"]
# Our name, GGUF's, safetensors'; "" where a format has no such tensor.
NameRow = tuple[str, str, str]

# Names are without ".weight"; a name that ends in ".bias" becomes ours with "_bias" added.
MODEL_NAMES: tuple[NameRow, ...] = (
    ("embed", "token_embd", "embed_tokens"),
    ("norm", "output_norm", "norm"),
    ("head", "output", "lm_head"),
    ("rope_freqs", "rope_freqs", ""),
)

# After "layers.N." in ours, "blk.N." in GGUF, "layers.N." in safetensors; {e} is an expert.
LAYER_NAMES: tuple[NameRow, ...] = (
    ("attn.norm", "attn_norm", "input_layernorm"),
    ("attn.q", "attn_q", "self_attn.q_proj"),
    ("attn.k", "attn_k", "self_attn.k_proj"),
    ("attn.v", "attn_v", "self_attn.v_proj"),
    ("attn.out", "attn_output", "self_attn.o_proj"),
    ("attn.q_norm", "attn_q_norm", "self_attn.q_norm"),
    ("attn.k_norm", "attn_k_norm", "self_attn.k_norm"),
    ("ffn.norm", "ffn_norm", "post_attention_layernorm"),
    ("ffn.gate", "ffn_gate", "mlp.gate_proj"),
    ("ffn.up", "ffn_up", "mlp.up_proj"),
    ("ffn.down", "ffn_down", "mlp.down_proj"),
    ("ffn.router", "ffn_gate_inp", "mlp.gate"),
    ("ffn.experts.gate", "ffn_gate_exps", ""),
    ("ffn.experts.up", "ffn_up_exps", ""),
    ("ffn.experts.gate_up", "ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn.experts.down", "ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn.experts.{e}.gate", "", "mlp.experts.{e}.gate_proj"),
    ("ffn.experts.{e}.up", "", "mlp.experts.{e}.up_proj"),
    ("ffn.experts.{e}.down", "", "mlp.experts.{e}.down_proj"),
    ("ffn.shared.gate", "ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn.shared.up", "ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn.shared.down", "ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn.shared.router", "ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
)

_LAYER = {
    "gguf": re.compile(r"blk\.([0-9]+)\.(.+)"),
    "safetensors": re.compile(r"layers\.([0-9]+)\.(.+)"),
}
_OUR_LAYER = re.compile(r"layers\.([0-9]+)\.")
MTP_PREFIX = "mtp."  # in safetensors, of what predicts further ahead
# The number of an expert, in "mlp.experts.3.gate_proj" or "ffn_gate.3".
_EXPERT = re.compile(r"(?<=\.)[0-9]+(?=\.|\Z)")
# Text models inside models that see pictures have one of two prefixes, by transformers' version.
_MODEL_PREFIX = re.compile(r"\A(model\.(language_model\.)?|language_model\.(model\.)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How the files of one architecture name the model and those tensors that few others have."""

    architecture: str  # general.architecture of its GGUF files
    other_architectures: tuple[str, ...] = ()  # what other converters write there
    model_types: tuple[str, ...] = ()  # model_type of its config.json
    # Entries of `architectures` in config.json that name this architecture whatever the model_type.
    classes: tuple[str, ...] = ()
    # Additional rows; a row replaces the shared row with the same name in the file.
    model_names: tuple[NameRow, ...] = ()
    layer_names: tuple[NameRow, ...] = ()
    # Additional rows of a layer behind the model's own that predicts further ahead: after "blk.N."
    # in GGUF, after "mtp." in safetensors. Empty: such layers are not described.
    mtp_names: tuple[NameRow, ...] = ()
    # Our names of stacks of experts in safetensors, after "layers.N.": those whose matrices have
    # columns first, unless they are packed, and those in which rows of gate and up alternate.
    transposed_stacks: tuple[str, ...] = ()
    alternating_stacks: tuple[str, ...] = ()
    # Whether the head is the embedding where a config.json without weights does not say.
    tied_by_default: bool = False


Namings = Mapping[str, Naming]  # by architecture


def find_naming(architecture: str, namings: Namings) -> Naming:
    """Return the naming of an architecture; one that is not listed has the shared names alone."""
    for naming in namings.values():
        if architecture == naming.architecture or architecture in naming.other_architectures:
            return naming
    return Naming(architecture=architecture)


def canonical_name(name: str, naming: Naming, format: Format, layers: int = 0) -> str:
    """Return our name of a tensor, or the file's own name where the tables have none.

    A layer that predicts further ahead has the number after the model's own `layers`, as in GGUF;
    safetensors count it apart.
    """
    rest = _MODEL_PREFIX.sub("", name, count=1) if format == "safetensors" else name
    if format == "safetensors" and naming.mtp_names and rest.startswith(MTP_PREFIX):
        return _mtp_name(rest.removeprefix(MTP_PREFIX), naming, layers) or name
    layer = _LAYER[format].fullmatch(rest)
    if layer is None:
        return _look_up(rest, _model_table(naming, format)) or name
    found = _look_up(layer[2], _layer_table(naming, format))
    return f"layers.{layer[1]}.{found}" if found else name


def _mtp_name(rest: str, naming: Naming, layers: int) -> str | None:
    """Return our name of a tensor that safetensors have after "mtp."; None: it has none."""
    layer = _LAYER["safetensors"].fullmatch(rest)
    if layer is None:
        found = _look_up(rest, _by_file_name(naming.mtp_names, "safetensors"))
        return found and f"layers.{layers}.{found}"
    found = _look_up(layer[2], _layer_table(naming, "safetensors"))
    return found and f"layers.{layers + int(layer[1])}.{found}"


def safetensors_name(name: str, naming: Naming, layers: int, expert: int | None = None) -> str:
    """Return what safetensors call a GGUF tensor, without the model's prefix and ".weight".

    GGUF keeps all experts of a layer in one stack; `expert` asks for the name of one of them. A
    layer after the model's own `layers` predicts further ahead.
    """
    ours = canonical_name(name, naming, "gguf")
    layer = _OUR_LAYER.match(ours)
    before, rest = (layer[0], ours[layer.end() :]) if layer else ("", ours)
    if layer is not None and (ahead := int(layer[1]) - layers) >= 0:
        for known, _, name_there in naming.mtp_names:
            if rest == known:
                return MTP_PREFIX + name_there
        before = f"{MTP_PREFIX}layers.{ahead}."
    if expert is not None:
        rest = rest.replace(".experts.", ".experts.{e}.")
    theirs = _inverse(naming, layer is not None)
    stem = theirs.get(rest) or f"{theirs[rest.removesuffix('_bias')]}.bias"
    return before + stem.replace("{e}", str(expert))


@cache
def _inverse(naming: Naming, in_layer: bool) -> dict[str, str]:
    """Return safetensors' names by ours, inside layers or outside them."""
    table = (_layer_table if in_layer else _model_table)(naming, "safetensors")
    return {ours: theirs for theirs, ours in table.items()}


@cache
def _model_table(naming: Naming, format: Format) -> dict[str, str]:
    """Return our names by the file's, of tensors outside the layers."""
    return _by_file_name(MODEL_NAMES + naming.model_names, format)


@cache
def _layer_table(naming: Naming, format: Format) -> dict[str, str]:
    """Return our names by the file's, of tensors of a layer."""
    rows = LAYER_NAMES + naming.layer_names
    return _by_file_name(rows + naming.mtp_names if format == "gguf" else rows, format)


def _by_file_name(rows: tuple[NameRow, ...], format: Format) -> dict[str, str]:
    column = 1 if format == "gguf" else 2
    return {row[column]: row[0] for row in rows if row[column]}


def _look_up(name: str, table: dict[str, str]) -> str | None:
    stem, suffix = name.removesuffix(".weight"), ""
    if name.endswith(".bias"):
        stem, suffix = name.removesuffix(".bias"), "_bias"
    expert = _EXPERT.search(stem)
    found = table.get(_EXPERT.sub("{e}", stem, count=1))
    return found and found.replace("{e}", expert[0] if expert else "") + suffix
