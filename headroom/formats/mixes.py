"""Mixes: the type of each tensor in a quantised file, by the rules of llama.cpp's quantiser.

The rules go by GGUF's tensor names, whatever the family.
"""

from dataclasses import dataclass

from headroom.errors import OptionError
from headroom.formats.quants import (
    BF16,
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    QuantType,
)

# The type that replaces one whose blocks of 256 do not divide a row; its blocks have 32 values.
_NARROWER = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}
_ALWAYS_F32 = (
    "ffn_gate_inp", "ssm_conv1d", "exp_probs_b", ".scale", "rope_freqs",
    "layer_output_scale", ".bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mix:
    """The types of one mix."""

    base: QuantType  # of matrices that no other rule covers
    better: QuantType  # of half of the value and down projections
    head: QuantType  # of the head, also where it is the embedding table
    experts: QuantType | None = None  # of expert stacks; None: as other matrices


MIXES = {
    "f32": Mix(F32, F32, F32),
    "f16": Mix(F16, F16, F16),
    "bf16": Mix(BF16, BF16, BF16),
    "q8_0": Mix(Q8_0, Q8_0, Q8_0),
    "q6_k": Mix(Q6_K, Q6_K, Q6_K),
    "q5_k_m": Mix(Q5_K, Q6_K, Q6_K),
    "q4_k_m": Mix(Q4_K, Q6_K, Q6_K),
    "q4_1": Mix(Q4_1, Q4_1, Q6_K),
    "q4_0": Mix(Q4_0, Q4_0, Q6_K),
    "mxfp4": Mix(Q8_0, Q8_0, Q8_0, experts=MXFP4),
}


def find_mix(name: str) -> Mix:
    """Return a mix by its name, in upper or lower case."""
    mix = MIXES.get(name.lower().replace("-", "_"))
    if mix is None:
        raise OptionError(f"{name!r} is no quantisation.", hint=f"Choose {', '.join(MIXES)}.")
    return mix


def gets_better(index: int, count: int) -> bool:
    """Whether tensor `index` of `count` equal ones is in the half that gets the better type."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def kept_in_f32(name: str, shape: tuple[int, ...]) -> bool:
    """Whether every mix keeps a tensor in f32: vectors, norms, routers, convolutions."""
    return len(shape) < 2 or "norm" in name or any(word in name for word in _ALWAYS_F32)


def tensor_type(mix: Mix, name: str, shape: tuple[int, ...], tied: bool, better: bool) -> QuantType:
    """Return the type of a tensor; `better` asks for the mix's better type."""
    if kept_in_f32(name, shape):
        return F32
    if name.startswith("per_layer_model_proj"):
        return mix.base if mix.base.block == 1 else BF16  # quantisers do not convert it
    table = name.startswith(("token_embd", "per_layer_token_embd"))
    if name == "output.weight" or (table and tied):
        return _fitting(mix.head, shape[-1])
    if mix.experts is not None and "_exps" in name:
        return _fitting(mix.experts, shape[-1])
    return _fitting(mix.better if better and not table else mix.base, shape[-1])


def _fitting(quant: QuantType, row: int) -> QuantType:
    """Return `quant`, or the type that replaces it where its blocks do not divide a row."""
    if row % quant.block:
        quant = _NARROWER.get(quant, quant)
    return quant if row % quant.block == 0 else F16
