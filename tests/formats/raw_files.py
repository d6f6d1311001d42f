"""Writes GGUF and safetensors files byte by byte, so that tests can write wrong ones too."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
U32, F32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
Key = tuple[str, int, Any]  # name, type, value; an array's value is (element type, elements)
Tensor = tuple[str, Sequence[int], int, int]  # name, sizes as in the file, type, offset


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def encode(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        element, values = value
        head = struct.pack("<IQ", element, len(values))
        return head + b"".join(encode(element, item) for item in values)
    return struct.pack("<" + FORMATS[kind], value)


def key_bytes(key: Key) -> bytes:
    name, kind, value = key
    return text(name) + struct.pack("<I", kind) + encode(kind, value)


def tensor_bytes(tensor: Tensor) -> bytes:
    name, sizes, kind, offset = tensor
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    keys: Sequence[Key] = (),
    tensors: Sequence[Tensor] = (),
    data: bytes = b"",
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """Return a GGUF file."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    header += b"".join(map(key_bytes, keys)) + b"".join(map(tensor_bytes, tensors))
    return header + b"\0" * (-len(header) % alignment) + data


def small_gguf() -> bytes:
    """Return a GGUF file with a value of each kind, a vocabulary, and two tensors."""
    keys: list[Key] = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", U32, 32),
        ("llama.block_count", U32, 1),
        ("llama.rope.freq_base", F32, 1e4),
        ("llama.attention.head_count", ARRAY, (5, [4, 4])),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b", "ab", "é"])),
        ("tokenizer.ggml.token_type", ARRAY, (5, [1, 1, 1, 3])),
        ("tokenizer.ggml.scores", ARRAY, (6, [0.0, 1.0, 2.0, 3.0])),
        ("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"])),
        ("tokenizer.ggml.eos_token_id", U32, 3),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", STRING, "{{ messages }}"),
        ("nested", ARRAY, (ARRAY, [(4, [1, 2]), (STRING, ["x"])])),
    ]
    tensors: list[Tensor] = [
        ("token_embd.weight", (32, 2), 8, 0),
        ("blk.0.attn_q.weight", (4,), 0, 96),
    ]
    return gguf_bytes(keys, tensors, bytes(range(128)))


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file; a header given as bytes is taken as it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(kind: str, shape: Sequence[int], begin: int, end: int) -> dict[str, object]:
    """Return the header's entry of one tensor."""
    return {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}


LLAMA_CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 128,
    "vocab_size": 10,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_scaling": None,
    "eos_token_id": 2,
}


def write_folder(folder: Path, config: Mapping[str, object] = LLAMA_CONFIG) -> Path:
    """Write a folder that holds a config and one small tensor."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = {"model.embed_tokens.weight": entry("F32", (2, 2), 0, 16)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, bytes(16)))
    return folder
