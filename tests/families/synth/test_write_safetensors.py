"""Synthesised safetensors: transformers loads them whole, and they are the GGUF file's model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headroom import LLM, SamplingParams
from headroom.errors import OptionError
from headroom.families.files import open_checkpoint, open_header
from headroom.families.registry import FAMILIES, KNOWN, RUNNABLE, read_dims
from headroom.families.synth.blocks import as_plain
from headroom.families.synth.convert import safetensors_table
from headroom.families.synth.recipe import find_recipe, read_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf, write_safetensors
from headroom.formats.mixes import MIXES
from headroom.formats.quants import BF16
from headroom.formats.safetensors_writer import index_file, make_shards
from headroom.plan.sources import find_shape
from headroom.text.tokenizer import Tokenizer
from headroom.text.tokenizer_file import tokenizer_file

SIZES = [(name, size) for name in RUNNABLE for size in FAMILIES[name].synthesis.tiny]
IDS = torch.arange(300, 340)[None]


def synthesise(folder: Path, family: str, size: str = "tiny", mix: str = "bf16") -> Path:
    write_safetensors(Source(find_recipe(family, size), 1), folder, mix, tokenizer_file)
    return folder


def load(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_transformers_finds_every_tensor_and_no_other(
    family: str, size: str, tmp_path: Path
) -> None:
    model = load(synthesise(tmp_path / "model", family, size))
    with torch.no_grad():
        logits = model(input_ids=IDS).logits[0]
    assert logits.isfinite().all()
    assert 1.5 < logits.std() < 6
    choices = logits.argmax(-1)
    assert choices.unique().numel() > 10  # neither one token for all nor the input again
    assert (choices != IDS[0]).float().mean() > 0.5


@pytest.mark.parametrize(("family", "size"), [*SIZES, ("dflash", "tiny")])
def test_a_folder_gives_back_recipe_and_tokenizer(family: str, size: str, tmp_path: Path) -> None:
    folder = synthesise(tmp_path / "model", family, size)
    recipe = find_recipe(family, size)
    again = read_recipe(family, folder / "config.json")
    assert again.dims.vocab == recipe.dims.vocab
    for field in (
        "eps",
        "theta",
        "window_theta",
        "rope_dims",
        "yarn",
        "routed_scale",
        "softcap",
        "linear_factor",
    ):
        assert getattr(again, field) == getattr(recipe, field), field
    assert read_dims(open_header(folder)).kinds == recipe.dims.kinds
    if family != "dflash":
        assert find_shape(str(folder), tmp_path).weight_bytes > 0
        assert Tokenizer.from_checkpoint(open_checkpoint(folder)).decode([300]) != ""


def test_both_formats_hold_the_same_llama(tmp_path: Path) -> None:
    model = load(synthesise(tmp_path / "model", "llama", mix="f32"))
    write_gguf(Source(find_recipe("llama", "tiny"), 1), tmp_path / "m.gguf", "f32")
    prompt = IDS[0, :12].tolist()
    with torch.no_grad():
        expected = model.generate(
            IDS[:, :12], max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, 12:].tolist()
    for path in (tmp_path / "m.gguf", tmp_path / "model"):
        assert greedy(path, [prompt], 12) == [expected]


def test_safetensors_of_qwen35_undo_what_conversion_does_to_norms_and_heads(tmp_path: Path) -> None:
    recipe = find_recipe("qwen35", "tiny")
    source = Source(recipe, 1)
    model = load(synthesise(tmp_path / "model", "qwen35", mix="f32"))
    layer, dims = model.model.layers[0], recipe.dims
    norm = source.floats("blk.0.attn_norm.weight", (dims.hidden,))
    assert layer.input_layernorm.weight.detach().numpy() + 1 == pytest.approx(norm, abs=1e-6)
    tiled = source.floats("blk.0.ssm_alpha.weight", (dims.state_heads, dims.hidden))
    grouped = layer.linear_attn.in_proj_a.weight.detach().numpy()
    for head in range(dims.state_heads):
        key, place = divmod(head, dims.state_heads // dims.state_key_heads)
        assert (grouped[head] == tiled[place * dims.state_key_heads + key]).all()


def test_large_models_are_split_with_an_index() -> None:
    entries = [entry for entry, _ in safetensors_table(KNOWN["qwen3.6-27b"], BF16)]
    shards = make_shards(entries)
    assert len(shards) > 8
    assert shards[0].file == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sum(len(shard.entries) for shard in shards) == len(entries)
    assert list(index_file(shards)) == ["model.safetensors.index.json"]
    assert index_file(make_shards(entries, 1 << 60)) == {}


def test_bf16_is_rounded_to_the_nearest() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    assert (as_plain(values, BF16).view(np.int16) == expected).all()


def test_packed_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"Safetensors do not hold Q4_K_M. Choose F32, F16, BF16."
    ):
        synthesise(tmp_path / "model", "llama", mix="q4_k_m")


@pytest.mark.parametrize("mix", MIXES)
def test_a_llama_of_every_mix_says_what_transformers_says(mix: str, tmp_path: Path) -> None:
    write_gguf(Source(find_recipe("llama", "tiny"), 1), tmp_path / "m.gguf", mix)
    prompts = IDS[0, :32].view(8, 4)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model.generate(prompts, max_new_tokens=4, do_sample=False, eos_token_id=None)
    found = greedy(tmp_path / "m.gguf", prompts.tolist(), 4)
    assert found == expected[:, 4:].tolist()
    assert len({answer[0] for answer in found}) > 4  # what it says depends on what it reads


def greedy(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    with LLM(str(path), context=64, threads=1, kv_type="f32", dtype="f32") as llm:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return [list(done.token_ids) for done in llm.generate(prompts, params)]
