"""From GGUF's tensors to those of safetensors: names, shapes, and the order of rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from headroom.families.synth.blocks import Floats, as_plain
from headroom.families.synth.values import Source
from headroom.families.tables import Dims, tensor_table
from headroom.formats.gguf_writer import TensorEntry
from headroom.formats.names import file_name
from headroom.formats.quants import QuantType
from headroom.formats.writing import Job

_BARE = (
    "A_log", "dt_bias", "experts.gate_up_proj", "experts.down_proj", "router.scale",
    "router.per_expert_scale", "layer_scalar", "e_score_correction_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor's values come from."""

    name: str  # in GGUF
    shape: tuple[int, ...]  # there
    expert: int | None = None  # of a stack of experts, the one that is meant


def safetensors_table(dims: Dims, quant: QuantType) -> Iterator[tuple[TensorEntry, Origin]]:
    """Yield every tensor of a model's safetensors, with its origin."""
    fused = dims.architecture == "gemma4"
    for name, shape in tensor_table(dims).items():
        if name == "rope_freqs.weight":  # made from settings
            continue
        if len(shape) == 3 and not fused:
            for expert in range(shape[0]):
                theirs = _name(name, dims.architecture, expert)
                yield TensorEntry(theirs, shape[1:], quant), Origin(name, shape, expert)
            continue
        theirs = _name(name, dims.architecture)
        yield TensorEntry(theirs, _their_shape(name, shape), quant), Origin(name, shape)


def safetensors_jobs(source: Source, entry: TensorEntry, origin: Origin) -> Iterator[Job]:
    """Yield what makes a tensor's bytes; only those that change are made whole."""
    change = _change(origin.name, source.recipe.dims)
    theirs = TensorEntry(origin.name, origin.shape, entry.quant)
    if change is not None:
        yield lambda: as_plain(change(source.floats(origin.name, origin.shape)), entry.quant)
    elif origin.expert is not None:
        yield from source.slab_jobs(theirs, origin.expert)
    else:
        yield from source.jobs(theirs)


def _name(name: str, family: str, expert: int | None = None) -> str:
    theirs = file_name(name, family, expert)
    if not theirs.endswith(_BARE):
        theirs += ".weight"
    if family == "dflash" or theirs == "lm_head.weight":
        return theirs
    return f"model.{theirs}"


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name.endswith("ssm_conv1d.weight"):
        return shape[0], 1, shape[1]
    return (1, *shape) if name.endswith("ffn_gate_inp_shexp.weight") else shape


def _change(name: str, dims: Dims) -> Callable[[Floats], Floats] | None:
    """Return what undoes the conversion to GGUF, where that changes values or their order."""
    part = name.split(".")[2] if name.startswith("blk.") else name.split(".")[0]
    if dims.architecture == "llama" and part in ("attn_q", "attn_k"):
        return lambda rows: _half_split(rows, dims.head_dim)
    if not dims.architecture.startswith("qwen35"):
        return None
    if part.endswith("_norm") and part != "ssm_norm":
        return lambda weight: weight - 1
    keys, values = dims.state_key_heads, dims.state_heads
    if part in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt"):
        return lambda rows: _grouped(rows, keys, values)
    if part == "ssm_a":
        return lambda a: _grouped(np.log(-a), keys, values)
    if part in ("attn_qkv", "ssm_conv1d"):
        plain = 2 * keys * dims.state_dim
        return lambda rows: np.concatenate([rows[:plain], _grouped(rows[plain:], keys, values)])
    if part == "ssm_out":
        return lambda rows: np.ascontiguousarray(_grouped(rows.T, keys, values).T)
    return None


def _half_split(rows: Floats, head_dim: int) -> Floats:
    """Return rows whose rotated pairs lie half a head apart instead of side by side."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _grouped(rows: Floats, keys: int, values: int) -> Floats:
    """Return rows of value heads with those of one key head together."""
    heads = rows.reshape(values // keys, keys, rows.shape[0] // values, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)
