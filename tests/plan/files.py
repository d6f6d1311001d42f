"""GGUF files of every family with empty weights, written by the gguf package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headroom.families.dims import Dims, pattern
from headroom.families.tables import tensor_types
from headroom.formats.mixes import find_mix
from headroom.formats.quants import QuantType

SMALL: dict[str, Dims] = {
    "llama": Dims(
        architecture="llama", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, ffn=512,
    ),
    "llama of experts": Dims(
        architecture="llama", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, experts=8, experts_used=2, expert_ffn=512,
    ),
    "qwen3": Dims(
        architecture="qwen3", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=128, ffn=512, tied=True,
    ),
    "qwen3moe": Dims(
        architecture="qwen3moe", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=128, experts=16, experts_used=4, expert_ffn=256,
    ),
    "qwen35": Dims(
        architecture="qwen35", layers=8, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, ffn=512, kinds=pattern(8, 4, "recurrent"), state_heads=6, state_key_heads=2,
        state_dim=32,
    ),
    "qwen35moe": Dims(
        architecture="qwen35moe", layers=8, hidden=256, vocab=320, context=512, heads=4,
        kv_heads=2, head_dim=64, kinds=pattern(8, 4, "recurrent"), state_heads=6,
        state_key_heads=2, state_dim=32, experts=16, experts_used=4, expert_ffn=256,
        shared_ffn=256, fused_experts=True,
    ),
    "mistral3": Dims(
        architecture="mistral3", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, ffn=512, kinds=("window",) * 4, window=64,
    ),
    "smollm3": Dims(
        architecture="smollm3", layers=5, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, ffn=512, tied=True,
    ),
    "laguna": Dims(
        architecture="laguna", layers=8, hidden=256, vocab=320, context=512, heads=4,
        window_heads=6, kv_heads=2, head_dim=64, ffn=512, kinds=pattern(8, 4, "window", 0),
        window=64, experts=16, experts_used=4, expert_ffn=256, shared_ffn=256, dense_layers=1,
    ),
    "glm4moe": Dims(
        architecture="glm4moe", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, ffn=512, experts=16, experts_used=4, expert_ffn=256, shared_ffn=256,
        dense_layers=1, normed_heads=True,
    ),
    "gpt-oss": Dims(
        architecture="gpt-oss", layers=4, hidden=256, vocab=320, context=512, heads=4, kv_heads=2,
        head_dim=64, kinds=pattern(4, 2, "window"), window=64, experts=16, experts_used=4,
        expert_ffn=256,
    ),
    "gemma3": Dims(
        architecture="gemma3", layers=8, hidden=256, vocab=320, context=512, tied=True, heads=4,
        kv_heads=2, head_dim=64, ffn=512, kinds=pattern(8, 6, "window"), window=64,
    ),
    "gemma4": Dims(
        architecture="gemma4", layers=12, hidden=256, vocab=320, context=512, tied=True, heads=4,
        kv_heads=4, head_dim=64, ffn=512, kinds=pattern(12, 6, "window"), window=64,
        full_kv_heads=2, full_head_dim=128, keys_are_values=True, experts=16, experts_used=4,
        expert_ffn=96, fused_experts=True,
    ),
    "gemma4 E": Dims(
        architecture="gemma4", layers=12, hidden=256, vocab=320, context=512, tied=True, heads=4,
        kv_heads=2, head_dim=64, ffn=1024, ffn_by_layer=(512,) * 6 + (1024,) * 6,
        kinds=pattern(12, 6, "window"), window=64, full_kv_heads=2, full_head_dim=128,
        shared_kv_layers=6, per_layer_width=32,
    ),
    "dflash": Dims(
        architecture="dflash", layers=4, hidden=256, vocab=1, context=512, heads=4, kv_heads=2,
        head_dim=128, ffn=512, kinds=pattern(4, 4, "window"), window=128, taps=3, block=16,
    ),
}  # fmt: skip


def write_gguf(
    path: Path, dims: Dims, mix: str, keys: Mapping[str, Any] | None = None, leave_out: str = ""
) -> Path:
    """Write a model's file with zeros for weights; `keys` replace those of the dimensions."""
    writer = gguf.GGUFWriter(path, dims.architecture)
    for key, value in (gguf_keys(dims) | dict(keys or {})).items():
        name = f"{dims.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (shape, quant) in tensor_types(dims, find_mix(mix)).items():
        if name != leave_out:
            add_empty(writer, name, shape, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_empty(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], quant: QuantType) -> None:
    """Add a tensor of zeros."""
    row = quant.bytes_for(shape[-1])
    data = np.zeros((*shape[:-1], row), dtype=np.uint8)
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(quant.ggml_id))


def gguf_keys(dims: Dims) -> dict[str, Any]:
    """Return the keys that converters write for a family."""
    keys: dict[str, Any] = {
        "block_count": dims.layers, "context_length": dims.context,
        "embedding_length": dims.hidden, "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads, "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
    }  # fmt: skip
    if dims.ffn:
        keys["feed_forward_length"] = list(dims.ffn_by_layer) or dims.ffn
    if dims.experts:
        keys |= {"expert_count": dims.experts, "expert_used_count": dims.experts_used}
        keys["expert_feed_forward_length"] = dims.expert_ffn
    if dims.shared_ffn:
        keys["expert_shared_feed_forward_length"] = dims.shared_ffn
    if dims.window:
        keys["attention.sliding_window"] = dims.window
    return keys | _family_keys(dims)


def _family_keys(dims: Dims) -> dict[str, Any]:
    windows = [kind == "window" for kind in dims.kinds]
    if dims.architecture.startswith("qwen35"):
        return {
            "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": dims.state_dim,
            "ssm.group_count": dims.state_key_heads, "ssm.time_step_rank": dims.state_heads,
            "ssm.inner_size": dims.state_width,
        }  # fmt: skip
    if dims.architecture == "laguna":
        heads = [dims.window_heads if window else dims.heads for window in windows]
        return {"attention.head_count": heads, "leading_dense_block_count": 1, "vocab_size": 320}
    if dims.architecture == "gemma4":
        kv = [dims.kv_heads if window else dims.full_kv_heads for window in windows]
        return {
            "attention.head_count_kv": kv, "attention.key_length": dims.full_head_dim,
            "attention.key_length_swa": dims.head_dim,
            "attention.sliding_window_pattern": windows,
            "attention.shared_kv_layers": dims.shared_kv_layers,
            "embedding_length_per_layer_input": dims.per_layer_width,
        }  # fmt: skip
    if dims.architecture == "dflash":
        return {"attention.sliding_window_pattern": windows, "target_layers": [2, 11, 20]}
    return {}
