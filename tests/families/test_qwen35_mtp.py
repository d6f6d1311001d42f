"""The prediction head of Qwen3.5 against its arithmetic written out in plain torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headroom.engine.request import SamplingParams
from headroom.families.synth.recipe import Recipe, cut, find_recipe, with_mtp
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf, write_safetensors
from headroom.layers.batch import Batch
from headroom.llm import LLM
from headroom.text.tokenizer_file import tokenizer_file

PROMPT = list(range(100, 171))  # more than a chunk and than a page
SETTINGS: dict[str, Any] = {
    "context": 256,
    "parallel": 2,
    "chunk": 32,
    "threads": 1,
    "kv_type": "f32",
    "dtype": "f32",
    "draft": "mtp",
    "draft_tokens": 3,
    "draft_always": True,
}
MODELS = ("qwen35", "qwen35moe")
FORMATS = ("gguf", "safetensors", "safetensors-fused", "safetensors-apart")


def recipe_of(family: str) -> Recipe:
    recipe = find_recipe(family, "tiny")
    return with_mtp(replace(recipe, dims=cut(recipe.dims, 4)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Safetensors of each model, which transformers reads, too."""

    @cache
    def write(family: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(family)
        write_safetensors(Source(recipe_of(family), seed=5), folder, "f32", tokenizer_file)
        return folder

    return write


@dataclass(frozen=True)
class Reference:
    """The head in float32, by the formulas of its paper and of other engines."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1 + self.tensors[name])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[name].T

    def run(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of rows; row s reads token s and the state after token s - 1."""
        embedded = self.tensors["model.embed_tokens.weight"][tokens]
        both = (
            self.norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
            self.norm(before, "mtp.pre_fc_norm_hidden.weight"),
        )
        x = self.linear(torch.cat(both, -1), "mtp.fc.weight")
        x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm.weight"))
        normed = self.norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        x = x + (self.experts(normed) if "num_experts" in self.config else self.mlp(normed, "mlp."))
        hidden = self.norm(x, "mtp.norm.weight")
        return hidden, self.linear(hidden, "lm_head.weight")

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        config, at = self.config, "mtp.layers.0.self_attn."
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        rows, dim = len(x), config["head_dim"]
        both = self.linear(x, f"{at}q_proj.weight").view(rows, heads, 2, dim)
        queries, gates = both[:, :, 0], both[:, :, 1]
        keys = self.linear(x, f"{at}k_proj.weight").view(rows, groups, dim)
        values = self.linear(x, f"{at}v_proj.weight").view(rows, groups, dim)
        queries = self.rotate(self.norm(queries, f"{at}q_norm.weight"))
        keys = self.rotate(self.norm(keys, f"{at}k_norm.weight"))
        keys, values = (y.repeat_interleave(heads // groups, dim=1) for y in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / dim**0.5
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values) * gates.sigmoid()
        return self.linear(mixed.flatten(1), f"{at}o_proj.weight")

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        rope = self.config["rope_parameters"]
        dims = int(rope["partial_rotary_factor"] * x.shape[-1])
        frequencies = rope["rope_theta"] ** (-torch.arange(0, dims, 2) / dims)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        left, right, rest = x.split([dims // 2, dims // 2, x.shape[-1] - dims], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)

    def mlp(self, x: torch.Tensor, part: str) -> torch.Tensor:
        at = f"mtp.layers.0.{part}"
        gate = torch.nn.functional.silu(self.linear(x, f"{at}gate_proj.weight"))
        up = self.linear(x, f"{at}up_proj.weight")
        return self.linear(gate * up, f"{at}down_proj.weight")

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        at, used = "mtp.layers.0.mlp.", self.config["num_experts_per_tok"]
        weights, ids = self.linear(x, f"{at}gate.weight").softmax(-1).topk(used, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        shared = self.mlp(x, "mlp.shared_expert.")
        out = self.linear(x, f"{at}shared_expert_gate.weight").sigmoid() * shared
        rows = [
            sum(
                weight * self.mlp(row[None], f"mlp.experts.{expert}.")
                for weight, expert in zip(own, picked.tolist(), strict=True)
            )
            for row, own, picked in zip(x, weights, ids, strict=True)
        ]
        return out + torch.cat(rows)


@dataclass
class Seen:
    """What the engine's head computed: rows of one token each, in the order of their steps."""

    first: bool  # it begins a draft
    position: int
    token: int
    hidden: torch.Tensor
    logits: torch.Tensor


def watched(llm: LLM) -> list[Seen]:
    """Note every row by which a loaded model guesses."""
    network: Any = llm.engine._pipeline._stages[-1].draft_network
    predict, guess, seen = network.predict, network.guess, []
    begun = [0]

    def begin(asked: Any) -> Any:
        begun[0] = len(seen)
        return guess(asked)

    def note(batch: Batch, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = predict(batch, before)
        for row in range(len(hidden)):
            position, token = int(batch.positions[row]), int(batch.tokens[row])
            first = len(seen) == begun[0]
            seen.append(Seen(first, position, token, hidden[row].clone(), logits[row].clone()))
        return hidden, logits

    network.predict, network.guess = note, begin
    return seen


def rewritten(folder: Path, target: Path, format: str) -> Path:
    """Write the safetensors again with the experts of the head, or of the other layers, fused.

    Checkpoints of Qwen3.6 have those of the head fused, those of Qwen3.5 all others.
    """
    tensors, of_head = load_file(folder / "model.safetensors"), format.endswith("fused")
    first = "mtp.layers.0.mlp." if of_head else "model.layers.0.mlp."
    layers = {name.split("mlp.experts.")[0] for name in tensors if "mlp.experts." in name}
    layers = {x for x in layers if x.startswith("mtp.") == of_head}
    assert f"{first}experts.0.gate_proj.weight" in tensors
    for layer in layers:
        count = len([x for x in tensors if x.startswith(f"{layer}mlp.experts.")]) // 3
        parts: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
        for expert in range(count):
            for part, found in parts.items():
                found.append(tensors.pop(f"{layer}mlp.experts.{expert}.{part}_proj.weight"))
        gate_up = zip(parts["gate"], parts["up"], strict=True)
        both = torch.stack([torch.cat(pair) for pair in gate_up])
        tensors[f"{layer}mlp.experts.gate_up_proj"] = both
        tensors[f"{layer}mlp.experts.down_proj"] = torch.stack(parts["down"])
    for file in folder.iterdir():
        if not file.name.startswith("model"):
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def cases() -> Iterator[tuple[str, str]]:
    for family in MODELS:
        for format in FORMATS[: 4 if family == "qwen35moe" else 2]:
            yield family, format


@pytest.mark.parametrize(("family", "format"), list(cases()))
def test_guesses_equal_the_arithmetic_written_out_after_any_tokens(
    family: str, format: str, folders: Any, tmp_path: Path
) -> None:
    folder = path = folders(family)
    if format == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(Source(recipe_of(family), seed=5), path, "f32")
    elif format != "safetensors":
        path = rewritten(folder, tmp_path, format)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(str(path), **SETTINGS) as llm:
        seen = watched(llm)
        (answer,) = llm.generate([PROMPT], params)
    assert len(seen) > 12
    text = torch.tensor([*PROMPT, *answer.token_ids])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model.model(input_ids=text[None]).last_hidden_state[0]
    config = json.loads((folder / "config.json").read_text())
    head = Reference(load_file(folder / "model.safetensors"), config)
    tokens, before = text[:0], states[:0]
    largest = 0.0
    for row in seen:
        if row.first:
            assert row.token == text[row.position]  # the sequence's last token
            tokens = text[: row.position]
            before = torch.cat([torch.zeros_like(states[:1]), states])[: row.position + 1]
        tokens = torch.cat([tokens, torch.tensor([row.token])])
        hidden, logits = head.run(tokens, before)
        torch.testing.assert_close(row.hidden, hidden[-1], atol=1e-4, rtol=0)
        torch.testing.assert_close(row.logits, logits[-1], atol=1e-4, rtol=0)
        before = torch.cat([before, hidden[-1:]])
        largest = max(largest, float(logits[-1].abs().max()))
    assert largest > 5  # so that the tolerance is small beside the logits
