"""Draft trees through whole models, and models that refuse them before anything is loaded."""

from pathlib import Path

import pytest
import torch

from headroom.errors import KernelError
from headroom.families.files import open_checkpoint
from headroom.plan.describe import describe
from tests.running import open_pipeline
from tests.synth_models import write_model
from tests.trees import PARENTS, path_logits, tree_batch, tree_logits

PROMPT = torch.randint(300, 1000, (50,), generator=torch.Generator().manual_seed(5)).tolist()
GUESSES = list(range(400, 400 + len(PARENTS)))


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_every_path_of_a_tree_has_the_logits_of_its_tokens_as_text(
    name: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_model(name, "q8_0", tmp_path, few_layers=True))
    assert describe(checkpoint).config.refuses_trees == ""
    found = tree_logits(checkpoint, PROMPT, GUESSES)
    for row in (0, 3, 6, 8, 10):
        wanted = path_logits(checkpoint, PROMPT, GUESSES, row)
        torch.testing.assert_close(found[row], wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_models_with_linear_attention_say_before_they_are_loaded_that_trees_are_refused(
    name: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(write_model(name, "q8_0", tmp_path, few_layers=True))
    reason = "3 of 4 layers are linear attention, with one state a sequence"
    assert describe(checkpoint).config.refuses_trees == reason
    pipeline = open_pipeline(checkpoint)
    assert pipeline.refuses_trees == reason
    with pytest.raises(KernelError) as refused:
        pipeline.forward(tree_batch(GUESSES, 0))
    assert str(refused.value) == (
        f"This model runs no draft trees: {reason}. "
        "Draft a chain for this model, or run it without a draft."
    )
    pipeline.close()
