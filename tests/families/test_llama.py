"""The Llama family against transformers, from both formats."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from headroom.errors import ModelError
from headroom.families.files import open_checkpoint
from headroom.plan.describe import describe
from tests.running import greedy_tokens, run_steps
from tests.tiny import VOCAB, gguf_tensors, llama_config, random_model, save_gguf, save_safetensors

PROMPT = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(5)).tolist()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def expected_logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    "pieces", [[90], [33, 40, 17], [1] * 90], ids=["whole", "chunks", "decode"]
)
def test_logits_equal_transformers(
    tmp_path: Path, format: str, tied: bool, pieces: list[int], kernels: str
) -> None:
    model = random_model(llama_config(tie_word_embeddings=tied))
    save = save_safetensors if format == "safetensors" else save_gguf
    checkpoint = open_checkpoint(
        save(model, tmp_path / ("m" if format == "safetensors" else "m.gguf"))
    )
    logits = run_steps(checkpoint, [PROMPT], [pieces], kernels=kernels)[0]
    torch.testing.assert_close(logits, expected_logits(model, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_scaled_rope_equals_transformers(tmp_path: Path, rope: dict[str, float]) -> None:
    model = random_model(llama_config(rope_parameters=rope))
    checkpoint = open_checkpoint(save_safetensors(model, tmp_path / "m"))
    logits = run_steps(checkpoint, [PROMPT], [[90]])[0]
    torch.testing.assert_close(logits, expected_logits(model, PROMPT), atol=1e-4, rtol=0)


def test_a_mixed_batch_of_sequences_equals_transformers(tmp_path: Path) -> None:
    model = random_model(llama_config())
    checkpoint = open_checkpoint(save_safetensors(model, tmp_path / "m"))
    prompts = [PROMPT[:50], PROMPT[20:85], PROMPT[70:]]
    pieces = [[30, 1, 1, 18], [65], [1, 1, 1, 17]]
    for prompt, logits in zip(prompts, run_steps(checkpoint, prompts, pieces), strict=True):
        torch.testing.assert_close(logits, expected_logits(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
@pytest.mark.parametrize("weights", ["packed", "unpacked"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_quantised_weights_equal_their_dequantised_values(
    tmp_path: Path, quant: str, weights: str, kernels: str
) -> None:
    model = random_model(llama_config(hidden_size=96, intermediate_size=128))
    checkpoint = open_checkpoint(save_gguf(model, tmp_path / "m.gguf", quant))
    rounded = random_model(model.config)
    rounded.load_state_dict(_rounded_state(model, quant))
    logits = run_steps(checkpoint, [PROMPT], [[90]], weights=weights, kernels=kernels)[0]
    torch.testing.assert_close(logits, expected_logits(rounded, PROMPT), atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers_over_64_tokens(tmp_path: Path) -> None:
    model = random_model(llama_config())
    checkpoint = open_checkpoint(save_gguf(model, tmp_path / "m.gguf"))
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(64):
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
    assert greedy_tokens(checkpoint, PROMPT, 64) == ids[0, len(PROMPT) :].tolist()


def test_an_unsupported_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = random_model(llama_config(rope_parameters=rope))
    checkpoint = open_checkpoint(save_safetensors(model, tmp_path / "m"))
    with pytest.raises(ModelError, match="rotary scaling 'dynamic' is not supported"):
        describe(checkpoint)


def test_biases_are_refused_by_name(tmp_path: Path) -> None:
    model = random_model(llama_config(attention_bias=True))
    checkpoint = open_checkpoint(save_safetensors(model, tmp_path / "m"))
    with pytest.raises(ModelError, match=r"hf\.attention_bias is True, which is not supported"):
        describe(checkpoint)


def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path: Path) -> None:
    model = random_model(llama_config())
    path = tmp_path / "m.gguf"
    tensors = gguf_tensors(model)
    tensors["blk.0.attn_q_norm.weight"] = np.ones(16, dtype=np.float32)
    _write(model, path, tensors)
    with pytest.raises(ModelError, match=r"'layers\.0\.attn\.q_norm', which llama models do not"):
        describe(open_checkpoint(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = random_model(llama_config())
    tensors = gguf_tensors(model)
    del tensors["blk.1.ffn_up.weight"]
    _write(model, tmp_path / "m.gguf", tensors)
    with pytest.raises(ModelError, match=r"no tensor 'layers\.1\.ffn\.up'"):
        describe(open_checkpoint(tmp_path / "m.gguf"))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    model = random_model(llama_config())
    tensors = gguf_tensors(model)
    tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:50]
    _write(model, tmp_path / "m.gguf", tensors)
    with pytest.raises(ModelError, match=r"ffn_up\.weight is \[50, 48\], not \[96, 48\]"):
        describe(open_checkpoint(tmp_path / "m.gguf"))


def test_an_unknown_architecture_is_refused_with_those_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mystery")
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'mystery' model, which is not supported.*llama"):
        describe(open_checkpoint(tmp_path / "m.gguf"))


def _rounded_state(model: LlamaForCausalLM, quant: str) -> dict[str, torch.Tensor]:
    kind = gguf.GGMLQuantizationType[quant]

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 1:
            return tensor
        packed = gguf.quants.quantize(tensor.numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind).reshape(tensor.shape))

    return {name: rounded(name, tensor) for name, tensor in model.state_dict().items()}


def _write(model: LlamaForCausalLM, path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a llama file whose tensor table is not what its settings say."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
