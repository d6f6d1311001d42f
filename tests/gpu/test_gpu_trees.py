"""Draft trees through whole models on a GPU against the plain kernels of the CPU."""

from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from tests.synth_models import write_model
from tests.trees import PARENTS, tree_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PROMPT = torch.randint(300, 1000, (90,), generator=torch.Generator().manual_seed(7)).tolist()
GUESSES = list(range(400, 400 + len(PARENTS)))
# As tests of whole models allow: of logits in bf16, and those of tiny Gemma models.
LIMITS = {"llama": 0.03, "gemma4": 0.1}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize(("dtype", "share"), [("bf16", 1.0), ("f16", 0.4)])
def test_a_step_with_a_tree_in_16_bits_is_near_the_exact_one(
    name: str, dtype: str, share: float, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_model(name, "q4_k_m", tmp_path, few_layers=True))
    wanted = tree_logits(checkpoint, PROMPT, GUESSES, device="cpu", kernels="reference")
    settings = {"device": "cuda:0", "dtype": dtype, "kv_type": dtype}
    found = tree_logits(checkpoint, PROMPT, GUESSES, **settings)
    assert float((found - wanted).norm() / wanted.norm()) < LIMITS[name] * share


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_with_a_tree_in_f32_has_the_best_tokens_of_the_cpu(
    name: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_model(name, "q4_k_m", tmp_path, few_layers=True))
    wanted = tree_logits(checkpoint, PROMPT, GUESSES, device="cpu", kernels="reference")
    found = tree_logits(checkpoint, PROMPT, GUESSES, device="cuda:0")
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.argmax(1), wanted.argmax(1))
