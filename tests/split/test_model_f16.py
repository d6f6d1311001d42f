"""Every kind of layer in f16 on a GPU of sm_75, the stand-in: its kernels run on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from tests.running import run_steps
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import TURING, stand_in_gpu
from tests.stand_in.model import ModelOnGpu, run_on_gpu
from tests.synth_models import write_model

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

PROMPT = torch.randint(300, 1000, (35,), generator=torch.Generator().manual_seed(1)).tolist()
PIECES = [33, 2]  # the first is longer than what goes as few rows
# Of logits, relative; 0.0004 to 0.0014 were measured. Random weights of Gemma make ten times as
# much of what is rounded.
LIMIT, GEMMA_LIMIT = 0.005, 0.03


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with stand_in_gpu(monkeypatch, TURING):
        yield


@pytest.mark.parametrize(
    ("name", "mix", "kv_type"),
    [
        pytest.param("llama", "q8_0", "f16", marks=pytest.mark.slow),
        ("qwen3moe", "q8_0", "q8_0"),
        pytest.param("qwen3moe", "bf16", "f16", marks=pytest.mark.slow),
        pytest.param("qwen35-wide", "q4_k_m", "bf16", marks=pytest.mark.slow),
        pytest.param("laguna", "q8_0", "f16", marks=pytest.mark.slow),
        pytest.param("gemma4", "q8_0", "f16", marks=pytest.mark.slow),
        pytest.param("qwen3", "bf16", "f16", marks=pytest.mark.slow),
        pytest.param("gemma4-e2b", "f16", "f16", marks=pytest.mark.slow),
    ],
)
def test_logits_in_f16_on_sm_75_are_near_the_exact_ones(
    name: str, mix: str, kv_type: str, tmp_path: Path, turing: None
) -> None:
    checkpoint = open_checkpoint(write_model(name, mix, tmp_path))
    exact = run_steps(checkpoint, [PROMPT], [PIECES], kernels="reference")[0]
    settings = {"gpu": TURING.spec, "dtype": "f16", "kv_type": kv_type}

    def fused(stage: ModelOnGpu) -> None:
        assert stage.model.capturable
        for line in ("core_weights", "hot_experts", "embeddings", "head"):
            assert stage.counted[line] == stage.planned.get(line, 0)

    logits = run_on_gpu(checkpoint, [PROMPT], PIECES, fused, **settings)[0]
    limit = GEMMA_LIMIT if "gemma" in name else LIMIT
    assert float((logits - exact).norm() / exact.norm()) < limit
