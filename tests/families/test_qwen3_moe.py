"""What sets Qwen3 with experts apart from other families: its rule of weights, its refusals."""

from pathlib import Path

import pytest
import torch

from headroom.errors import ModelError
from headroom.families.files import open_checkpoint
from headroom.plan.describe import describe
from tests.families import family_configs
from tests.families.oracles import PROMPT, oracle_logits
from tests.running import run_steps


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_unnormalised_weights_of_experts_equal_transformers(tmp_path: Path, kernels: str) -> None:
    model = family_configs.qwen3_moe(norm_topk_prob=False)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    logits = run_steps(checkpoint, [PROMPT], [[len(PROMPT) - 1, 1]], kernels=kernels)[0]
    torch.testing.assert_close(logits, oracle_logits(model, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 2}, r"hf\.decoder_sparse_step is 2, which is not supported"),
        ({"mlp_only_layers": [1]}, r"hf\.mlp_only_layers is \[1\], which is not supported"),
    ],
)
def test_dense_layers_among_those_with_experts_are_refused_by_name(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    family_configs.qwen3_moe(**change).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        describe(open_checkpoint(tmp_path))
