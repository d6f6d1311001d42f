"""A whole model with Triton's kernels, from request to tokens, on the stand-in for a GPU."""

from pathlib import Path

import pytest

from headroom import llm
from headroom.engine.request import SamplingParams
from tests.kernels.test_triton import interpreted, use_large_tiles
from tests.stand_in.gpu import stand_in_gpu

PROMPTS = [[72, 101, 108, 108, 111], [7] * 40]  # the second has more rows than a decode step
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=3, ignore_eos=True)
# The Triton kernels that a layer of a Llama uses.
WANTED = {"embed", "rms_norm", "product", "rope", "write", "attend", "gated"}
SETTINGS = {"context": 64, "parallel": 2, "dtype": "f32", "kv_type": "f32"}


def answers(path: Path, **settings: object) -> list[tuple[int, ...]]:
    with llm.LLM(str(path), **SETTINGS, **settings) as model:
        done = model.generate(PROMPTS, GREEDY) + model.generate(PROMPTS[:1], DRAWN)
    return [answer.token_ids for answer in done]


@pytest.fixture
def wanted(tiny_path: Path) -> list[tuple[int, ...]]:
    """The tokens of the CPU with reference kernels."""
    return answers(tiny_path, device="cpu", kernels="reference", threads=1)


@interpreted
def test_a_model_with_triton_kernels_gives_the_tokens_of_the_cpu(
    wanted: list[tuple[int, ...]], tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_large_tiles(monkeypatch)
    with stand_in_gpu(monkeypatch) as gpu:
        assert answers(tiny_path, device="cuda:0", kernels="triton") == wanted
    assert gpu.kernels >= WANTED
