"""Small checkpoints with random weights, made by transformers, in both formats."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.optional import optional

gguf = optional("gguf")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB = 320  # 256 bytes, then special tokens and padding
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def llama_config(**changes: Any) -> LlamaConfig:
    """A Llama of a few thousand values with unequal head counts."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    return LlamaConfig(**{**settings, **changes})


def random_model(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """A model in float32 whose every parameter is random, norms included."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.9 / parameter.shape[-1] ** 0.5)
        model.model.embed_tokens.weight.mul_(4)
    return model.eval()


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: one token per byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_safetensors(model: LlamaForCausalLM, folder: Path) -> Path:
    """Save a model as transformers does, with a tokenizer and a chat template."""
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def save_gguf(model: LlamaForCausalLM, path: Path, quant: str = "F32") -> Path:
    """Save a Llama as llama.cpp's converter would: q and k rows permuted, norms in F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    add_vocabulary(writer)
    for name, tensor in gguf_tensors(model).items():
        kind = (
            gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else gguf.GGMLQuantizationType[quant]
        )
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F16
        data = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """A Llama's weights under GGUF's names, in GGUF's row order."""
    config = model.config
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    tensors = {"token_embd.weight": state["model.embed_tokens.weight"]}
    tensors["output_norm.weight"] = state["model.norm.weight"]
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for index in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{index}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = weight.shape[0] // config.head_dim
                weight = weight.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2)
                weight = np.ascontiguousarray(weight.reshape(heads * config.head_dim, -1))
            tensors[f"blk.{index}.{ours}.weight"] = weight
    return tensors


def add_vocabulary(writer: Any, pre: str = "smollm") -> None:
    """Write the byte tokenizer's keys; `pre` names the rule that splits words."""
    tokenizer = byte_tokenizer()
    known = {index: text for text, index in tokenizer.get_vocab().items()}
    tokens = [known.get(index, f"[PAD{index}]") for index in range(VOCAB)]
    types = [3 if text in SPECIAL else 5 if text.startswith("[PAD") else 1 for text in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([])
    writer.add_eos_token_id(256)
    writer.add_chat_template(CHAT_TEMPLATE)
