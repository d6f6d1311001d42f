"""Write a Llama of 1.1 billion random weights (2048 wide, 22 layers), for speed alone.

python benchmarks/random_llama.py OUT.gguf --quant Q4_K_M
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS, VOCAB = 22, 2048, 5632, 32, 4, 32000
HEAD_DIM = HIDDEN // HEADS
# Where f16 scales lie in a block, and the largest whole number that they multiply.
LARGEST = {
    gguf.GGMLQuantizationType.Q4_K: ((0, 2), 63 * 15),
    gguf.GGMLQuantizationType.Q6_K: ((208,), 127 * 32),
}


def shapes() -> dict[str, tuple[int, int]]:
    """Return the matrices by GGUF's names."""
    found = {"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (WIDTH, HIDDEN),
            "ffn_up": (WIDTH, HIDDEN),
            "ffn_down": (HIDDEN, WIDTH),
        }.items():
            found[f"blk.{layer}.{name}.weight"] = shape
    return found


def random_blocks(shape: tuple[int, int], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks of a type, with f16 scales (and mins) that make small weights."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(
        0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8
    )
    places, largest = LARGEST.get(kind, ((0,), 1 << (8 * (size - 2) // block - 1)))
    for place in places:
        data[..., place : place + 2] = np.float16(0.02 / largest).reshape(1).view(np.uint8)
    return data.reshape(shape[0], -1)


def type_of(name: str, quant: str) -> gguf.GGMLQuantizationType:
    """Return a matrix's type; Q4_K_M has Q6_K for the head and half of all values and downs."""
    if quant != "Q4_K_M":
        return gguf.GGMLQuantizationType[quant]
    better = name == "output.weight" or (
        ("attn_v" in name or "ffn_down" in name) and int(name.split(".")[1]) % 2
    )
    return gguf.GGMLQuantizationType.Q6_K if better else gguf.GGMLQuantizationType.Q4_K


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--quant", choices=("Q8_0", "Q4_0", "Q4_K_M"), default="Q4_0")
    given = parser.parse_args()
    writer = gguf.GGUFWriter(given.out, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["t", "0", "t0", *(f"word{index}" for index in range(3, VOCAB))])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)
    for name, shape in shapes().items():
        kind = type_of(name, given.quant)
        writer.add_tensor(name, random_blocks(shape, kind), raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{i}.{n}_norm" for i in range(LAYERS) for n in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
