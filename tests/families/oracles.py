"""Small models of every family: transformers' own, files of them, and what they answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.families import family_configs as configs
from tests.families.family_gguf import ARCHITECTURES, from_gguf, read_gguf, write_gguf
from tests.tiny import CHAT_TEMPLATE, VOCAB, byte_tokenizer

# Longer than every window.
PROMPT = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of model. Its model, files and answers are equal at every call."""

    name: str
    build: Callable[..., PreTrainedModel]
    changes: tuple[tuple[str, Any], ...] = ()  # of the settings that `build` has
    fused: bool = False  # in GGUF, gate and up of all experts lie in one tensor
    unused_keys: bool = False  # in GGUF, layers without a cache have keys nevertheless

    def model(self) -> PreTrainedModel:
        """Return the model of transformers, which tests must not change."""
        return _model(self.name)

    @property
    def architecture(self) -> str:
        """GGUF's name of the family."""
        return ARCHITECTURES[self.model().config.model_type]

    def save_safetensors(self, folder: Path) -> Path:
        """Save the model as transformers does, with a tokenizer and a chat template."""
        self.model().save_pretrained(folder)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return folder

    def save_gguf(
        self,
        path: Path,
        quant: str = "F32",
        *,
        fused: bool | None = None,
        unused_keys: bool | None = None,
    ) -> Path:
        """Save the model as a converter would; `quant` is a type, or MIXED for several."""
        fused = self.fused if fused is None else fused
        unused_keys = self.unused_keys if unused_keys is None else unused_keys
        write_gguf(self.model(), path, quant, fused, unused_keys)
        return path

    def dequantised_model(self, path: Path) -> PreTrainedModel:
        """Return a model with exactly the values that a GGUF file of this one holds."""
        model = self.build(**dict(self.changes))
        missing, unexpected = model.load_state_dict(from_gguf(model, read_gguf(path)), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # of tied models
        return model


def _variant(name: str, build: Callable[..., PreTrainedModel], **more: Any) -> Variant:
    files = {key: more.pop(key) for key in ("fused", "unused_keys") if key in more}
    return Variant(name, build, tuple(more.items()), **files)


VARIANTS: dict[str, Variant] = {
    found.name: found
    for found in (
        _variant("llama", configs.llama),
        _variant("mixtral", configs.mixtral),
        _variant("mistral", configs.mistral),
        _variant("ministral", configs.ministral),
        _variant("ministral3", configs.ministral3),
        _variant("ministral3-magnitude", configs.ministral3, mscale_all_dim=0.0),
        _variant("smollm3", configs.smollm3),
        _variant("glm4moe", configs.glm4_moe),
        _variant("gpt-oss", configs.gpt_oss),
        _variant("qwen3-tied", configs.qwen3),
        _variant("qwen3-untied", configs.qwen3, tie_word_embeddings=False),
        _variant("qwen3moe", configs.qwen3_moe),
        _variant("qwen3moe-fused", configs.qwen3_moe, fused=True),
        # Groups of 16 columns move in ssm_out: half a block of 32.
        _variant("qwen35", configs.qwen35, state_dim=16),
        _variant("qwen35-wide", configs.qwen35),
        _variant(
            "qwen35-equal-heads",
            configs.qwen35,
            key_heads=4,
            value_heads=4,
            tie_word_embeddings=True,
        ),
        _variant("qwen35moe", configs.qwen35_moe),
        _variant("qwen35moe-fused", configs.qwen35_moe, value_heads=6, fused=True),
        _variant("laguna", configs.laguna),
        _variant("laguna-per-element", configs.laguna, gating="per-element", attention_factor=None),
        _variant("gemma3", configs.gemma3),
        _variant("gemma4-31b", configs.gemma4),
        _variant("gemma4-26b", configs.gemma4_moe, fused=True),
        _variant("gemma4-26b-separate", configs.gemma4_moe),
        _variant("gemma4-e4b", configs.gemma4_small, unused_keys=True),
        _variant("gemma4-e2b", configs.gemma4_smallest),
    )
}


def variant(name: str) -> Variant:
    """Return a variant by name."""
    return VARIANTS[name]


@cache
def _model(name: str) -> PreTrainedModel:
    found = VARIANTS[name]
    return found.build(**dict(found.changes))


def oracle_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits [tokens, vocabulary] of a text read at once."""
    return _logits(model, tuple(ids))


def oracle_greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' likeliest continuation, decoded with its cache."""
    return list(_greedy(model, tuple(prompt), count))


@cache
def _logits(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@cache
def _greedy(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids, past, chosen = torch.tensor([prompt]), None, []
    with torch.inference_mode():
        for _ in range(count):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            chosen.append(int(ids))
    return tuple(chosen)
