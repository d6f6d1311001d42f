"""Vectors of prompts on a GPU against the plain kernels of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headroom.engine.pooling import Vector
from headroom.engine.request import Pooling, SamplingParams
from headroom.llm import LLM
from tests.synth_models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# In one step and in several, and of few rows, which take the path of decode steps.
PROMPTS = [
    torch.randint(300, 1000, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    for rows in (90, 41, 7, 200, 1, 33)
]
ANSWER = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def vectors(path: Path, pooling: Pooling, **settings: object) -> Vector:
    """Return the vectors of all prompts, computed beside an answer."""
    with LLM(str(path), context=256, parallel=6, chunk=40, **settings) as llm:
        llm.pooling = pooling
        answer = llm.stream(PROMPTS[1], ANSWER)
        found = np.stack(llm.embed(PROMPTS))
        assert len([piece.token for piece in answer]) == ANSWER.max_tokens
    return found


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama", "qwen35moe", "gemma4-e4b"])
def test_vectors_are_the_cpus(name: str, pooling: Pooling, tmp_path: Path) -> None:
    path = write_model(name, "q4_k_m", tmp_path, few_layers=True)
    exact = {"dtype": "f32", "kv_type": "f32"}
    wanted = vectors(path, pooling, device="cpu", kernels="reference", **exact)
    # At most 4e-7 was measured on an H200 in f32, and a cosine of at least 0.9998 in bf16.
    np.testing.assert_allclose(vectors(path, pooling, device="cuda:0", **exact), wanted, atol=5e-6)
    rounded = vectors(path, pooling, device="cuda:0", dtype="bf16", kv_type="bf16")
    assert (rounded * wanted).sum(axis=1).min() > 0.999
