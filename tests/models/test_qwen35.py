"""Qwen3.5 against transformers, from both formats; one result however steps divide a text."""

import logging
from pathlib import Path

import pytest
import torch

from headroom.errors import ModelError
from headroom.formats.checkpoint import Checkpoint, open_checkpoint
from headroom.models.describe import describe
from tests import family_configs as configs
from tests.families import oracle_greedy, oracle_logits, variant
from tests.running import greedy_tokens, run_steps
from tests.tiny import VOCAB

PROMPT = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(5)).tolist()
NAMES = ("qwen35", "qwen35-equal-heads")


def checkpoint(folder: Path, name: str, format: str) -> Checkpoint:
    found = variant(name)
    if format == "gguf":
        return open_checkpoint(found.save_gguf(folder / "m.gguf"))
    return open_checkpoint(found.save_safetensors(folder / "m"))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(tmp_path: Path, name: str, format: str, kernels: str) -> None:
    opened = checkpoint(tmp_path, name, format)
    expected = oracle_logits(variant(name).model(), PROMPT)
    for pieces in ([90], [1] * 90, [33, 1, 40, 2, 14]):
        logits = run_steps(opened, [PROMPT], [pieces], kernels=kernels)[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_same_rows_give_the_same_bits_however_steps_divide_them(
    tmp_path: Path, kernels: str
) -> None:
    opened = checkpoint(tmp_path, "qwen35", "gguf")
    prompts, alone = [PROMPT, PROMPT[30:], PROMPT[:7]], [[90], [60], [7]]
    whole = [
        run_steps(opened, [prompt], [pieces], kernels=kernels)[0]
        for prompt, pieces in zip(prompts, alone, strict=True)
    ]
    together = [[30, 1, 1, 58], [1, 58, 1], [3, 1, 1, 1, 1]]
    for one, other in zip(
        whole, run_steps(opened, prompts, together, kernels=kernels), strict=True
    ):
        assert torch.equal(one, other)


def test_a_mixed_batch_of_sequences_equals_transformers(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, "qwen35", "safetensors")
    prompts = [PROMPT[:50], PROMPT[20:85], PROMPT[70:]]
    pieces = [[30, 1, 1, 18], [65], [1, 1, 1, 17]]
    for prompt, logits in zip(prompts, run_steps(opened, prompts, pieces), strict=True):
        expected = oracle_logits(variant("qwen35").model(), prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_greedy_tokens_equal_transformers_over_64_tokens(tmp_path: Path, format: str) -> None:
    expected = oracle_greedy(variant("qwen35").model(), PROMPT, 64)
    assert greedy_tokens(checkpoint(tmp_path, "qwen35", format), PROMPT, 64) == expected
