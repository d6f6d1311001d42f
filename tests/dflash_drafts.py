"""Small random DFlash drafts, and their arithmetic in float64 without any cache."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headroom.plan.shape import ModelShape
from tests.plan.shapes import smollm2

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2, 3]},
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 2.0**-17,  # exact in the f32 of GGUF
    "rope_theta": 1e4,
    "sliding_window": 12,
    "use_sliding_window": True,
    "vocab_size": 320,
}
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip


def target_shape(hidden: int = 64, vocab: int = 320, layers: int = 4) -> ModelShape:
    """Return the shape of a target of these sizes; its other numbers do not matter to a draft."""
    shape = smollm2()
    return replace(shape, hidden=hidden, vocab=vocab, layers=shape.layers[:layers])


@dataclass(frozen=True)
class RandomDraft:
    """A draft's config.json, and its weights by the names of safetensors."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    def save(self, folder: Path) -> Path:
        """Write the draft as a folder of safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def random_draft(seed: int = 0, **changes: Any) -> RandomDraft:
    """Return a draft whose every weight is random, norms included; `changes` are of its config."""
    config = CONFIG | changes
    hidden, width, dim = (config[x] for x in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * dim, hidden), "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden), "self_attn.o_proj": (hidden, heads * dim),
            "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }  # fmt: skip
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in own.items()}
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        normal = torch.randn(shape, generator=source)
        weights[name] = 1 + 0.2 * normal if len(shape) == 1 else normal / shape[-1] ** 0.5
    return RandomDraft(config, weights)


def block_outputs(
    draft: RandomDraft,
    features: torch.Tensor,  # [tokens, taps, hidden]: of all tokens before the block
    embedded: torch.Tensor,  # [block, hidden]: of the block's tokens
    causal: bool | None = None,  # as the config says; None: layers with a window are
) -> torch.Tensor:
    """Return a block's outputs after the last norm, computed at once in float64."""
    config = draft.config
    weights = {name: tensor.double() for name, tensor in draft.weights.items()}
    eps, dim, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weights[f"{name}.weight"]

    frequencies, factor = _frequencies(dim, theta, config.get("rope_scaling"))

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None].double() * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    known, block = len(features), len(embedded)
    context = norm(features.double().flatten(1) @ weights["fc.weight"].T, "hidden_norm")
    x = embedded.double()
    query_at, key_at = torch.arange(known, known + block), torch.arange(known + block)
    for number, kind in enumerate(config["layer_types"]):
        at = f"layers.{number}."
        windowed = kind == "sliding_attention"
        seen = torch.ones(block, known + block, dtype=torch.bool)
        if windowed if causal is None else causal:
            seen &= key_at <= query_at[:, None]
        if windowed:
            # Layers that are not causal begin the window of all rows where that of the first does.
            begins = query_at if causal is not False else query_at[:1].expand(block)
            seen &= key_at > begins[:, None] - config["sliding_window"]
        h = norm(x, f"{at}input_layernorm")
        both = torch.cat((context, h))
        q = (h @ weights[f"{at}self_attn.q_proj.weight"].T).view(block, heads, dim)
        k = (both @ weights[f"{at}self_attn.k_proj.weight"].T).view(-1, kv_heads, dim)
        v = (both @ weights[f"{at}self_attn.v_proj.weight"].T).view(-1, kv_heads, dim)
        q = rotate(norm(q, f"{at}self_attn.q_norm"), query_at)
        k = rotate(norm(k, f"{at}self_attn.k_norm"), key_at)
        k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        x = x + mixed @ weights[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, f"{at}post_attention_layernorm")
        gate = torch.nn.functional.silu(h @ weights[f"{at}mlp.gate_proj.weight"].T)
        up = h @ weights[f"{at}mlp.up_proj.weight"].T
        x = x + (gate * up) @ weights[f"{at}mlp.down_proj.weight"].T
    return norm(x, "norm")


def _frequencies(
    dim: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[torch.Tensor, float]:
    """Return the angles of one position, and the factor of their cosines and sines."""
    plain = theta ** (-torch.arange(0, dim, 2).double() / dim)
    if scaling is None:
        return plain, 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def index(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(index(scaling["beta_fast"])), 0)
    high = min(math.ceil(index(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1
