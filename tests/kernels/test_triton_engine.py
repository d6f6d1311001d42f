"""A whole model in Triton's kernels, from request to tokens, on the stand-in GPU."""

from pathlib import Path

import pytest

from headroom import llm
from headroom.engine.request import SamplingParams
from tests.kernels.test_triton import interpreted, use_large_tiles
from tests.stand_in.gpu import stand_in_gpu

PROMPTS = [[72, 101, 108, 108, 111], [7] * 40]  # the second is longer than what goes as few rows
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=3, ignore_eos=True)
# What a layer of a Llama is made of, in Triton.
WANTED = {"embed", "rms_norm", "product", "rope", "write", "attend", "gated"}
SETTINGS = {"context": 64, "parallel": 2, "dtype": "f32", "kv_type": "f32"}


def answers(path: Path, **settings: object) -> list[tuple[int, ...]]:
    with llm.LLM(str(path), **SETTINGS, **settings) as model:
        done = model.generate(PROMPTS, GREEDY) + model.generate(PROMPTS[:1], DRAWN)
    return [answer.token_ids for answer in done]


@pytest.fixture
def wanted(tiny_path: Path) -> list[tuple[int, ...]]:
    """What the CPU says with plain kernels."""
    return answers(tiny_path, device="cpu", kernels="reference", threads=1)


@interpreted
def test_a_model_in_triton_says_what_the_cpu_says(
    wanted: list[tuple[int, ...]], tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_large_tiles(monkeypatch)
    with stand_in_gpu(monkeypatch) as gpu:
        assert answers(tiny_path, device="cuda:0", kernels="triton") == wanted
    assert gpu.kernels >= WANTED
