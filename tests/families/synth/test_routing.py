"""Skewed routing: hot experts really take the wished share, by what transformers computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headroom.errors import OptionError
from headroom.families.synth.recipe import Recipe, cut, find_recipe
from headroom.families.synth.routing import Places, hot_experts, make_skew
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_safetensors
from headroom.text.tokenizer_file import tokenizer_file

HOT = 0.5  # of the experts


def wide(family: str) -> Recipe:
    """A model with room for the beacon beside the channels of tokens."""
    recipe = find_recipe(family, "tiny")
    dims = cut(recipe.dims, 4) if recipe.dims.layers > 4 else recipe.dims
    return replace(recipe, dims=replace(dims, hidden=1024, expert_ffn=64))


def hot_share(source: Source, folder: Path) -> float:
    """Return the share of choices that go to hot experts, over random tokens and all layers."""
    write_safetensors(source, folder, "bf16", tokenizer_file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dims, chosen, layers = source.recipe.dims, [], []

    def look(_: object, __: object, output: tuple[torch.Tensor, ...]) -> None:
        # The last value that a router returns is the experts of each token.
        chosen.append(output[-1])

    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layers.append(index)
            layer.mlp.gate.register_forward_hook(look)
    with torch.no_grad():
        model(input_ids=torch.randint(0, dims.vocab, (1, 200)))
    assert chosen[0].shape == (200, dims.experts_used)
    hits = [
        torch.isin(ids, torch.from_numpy(hot_of(source, layer))).float().mean()
        for layer, ids in zip(layers, chosen, strict=True)
    ]
    return float(torch.stack(hits).mean())


def hot_of(source: Source, layer: int) -> Places:
    experts = source.recipe.dims.experts
    return hot_experts(source.seed, layer, experts, round(HOT * experts))


@pytest.mark.parametrize("family", ["qwen3moe", "qwen35moe", "laguna"])
def test_hot_experts_get_the_wanted_share(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = wide(family)
    assert hot_share(Source(recipe, 1), tmp_path / "plain") == pytest.approx(HOT, abs=0.07)
    skewed = Source(recipe, 1, make_skew(recipe, 0.8, HOT))
    assert hot_share(skewed, tmp_path / "skewed") == pytest.approx(0.8, abs=0.05)


def test_hot_experts_are_drawn_by_the_seed_for_each_layer() -> None:
    lowest = set(range(154))
    drawn = [tuple(hot_experts(1, layer, 256, 154).tolist()) for layer in range(40)]
    assert all(len(set(hot)) == 154 and set(hot) <= set(range(256)) for hot in drawn)
    assert len(set(drawn)) == 40
    # A placement without statistics keeps the lowest ids, and few hot experts among them.
    shares = [len(lowest & set(hot)) / 154 for hot in drawn]
    assert sum(shares) / 40 == pytest.approx(154 / 256, abs=0.03)
    assert drawn[3] == tuple(hot_experts(1, 3, 256, 154).tolist())
    assert drawn[3] != tuple(hot_experts(2, 3, 256, 154).tolist())


def test_an_impossible_skew_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--routing-skew does not work for llama."):
        make_skew(find_recipe("llama", "tiny"), 0.8, 0.6)
    with pytest.raises(OptionError, match=r"0.8 of the choices cannot go to 2 of 16 experts."):
        make_skew(wide("qwen3moe"), 0.8, 0.1)
    with pytest.raises(OptionError, match="needs a model that is 512 wide at least"):
        make_skew(find_recipe("qwen3moe", "tiny"), 0.8, 0.6)


@pytest.mark.parametrize("family", ["qwen3moe", "qwen35moe"])
def test_the_model_that_the_error_proposes_takes_a_skew(family: str) -> None:
    with pytest.raises(OptionError) as refused:
        make_skew(find_recipe(family, "tiny"), 0.8, 0.6)
    size = refused.value.hint.split()[2]
    assert refused.value.hint == (
        f"Try --size {size} --layers 4, or the family laguna, which needs neither."
    )
    assert make_skew(find_recipe(family, size, 4), 0.8, 0.6).hot > 0
    assert make_skew(find_recipe("laguna", "tiny"), 0.8, 0.6).hot > 0
