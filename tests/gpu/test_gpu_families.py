"""Every family on a GPU against the plain kernels of the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headroom.engine.request import SamplingParams
from headroom.formats.checkpoint import open_checkpoint
from headroom.llm import LLM
from tests.running import run_steps
from tests.synth_models import MODELS, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

GPU = "cuda:0"
# Of lengths that are read in several chunks, and in one; longer than the windows.
PROMPTS = [
    torch.randint(300, 1000, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    for rows in (90, 41, 7)
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=11, max_tokens=32,
    ignore_eos=True,
)  # fmt: skip
LIMIT = 0.03  # of logits in bf16 with activations of few rows in 8 bits; 0.005 to 0.012 measured
SETTINGS = {"context": 256, "parallel": 3, "chunk": 40}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model says to the prompts, worked on together."""

    greedy: list[tuple[int, ...]]
    drawn: list[str]


def answers(path: Path, **settings: object) -> Answers:
    """Ask a model in float32."""
    exact = {"dtype": "f32", "kv_type": "f32"} | SETTINGS | settings
    with LLM(str(path), **exact) as llm:
        greedy = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
        return Answers(greedy, [done.text for done in llm.generate(PROMPTS, DRAWN)])


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    """A model's name."""
    return str(request.param)


@pytest.fixture(scope="module")
def exact(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Answers]:
    """What the CPU says with plain kernels, and what the GPU says."""
    path = write_model(name, "q4_k_m", tmp_path_factory.mktemp(name))
    return answers(path, device="cpu", kernels="reference"), answers(path, device=GPU)


def test_the_likeliest_tokens_in_f32_are_the_cpus(exact: tuple[Answers, Answers]) -> None:
    cpu, gpu = exact
    assert gpu.greedy == cpu.greedy


def test_the_same_seed_draws_the_same_text_in_f32(exact: tuple[Answers, Answers]) -> None:
    cpu, gpu = exact
    assert gpu.drawn == cpu.drawn


def test_plain_kernels_on_a_gpu_say_the_same(name: str, tmp_path: Path) -> None:
    path = write_model(name, "q8_0", tmp_path)
    cpu = answers(path, device="cpu", kernels="reference")
    assert answers(path, device=GPU, kernels="reference").greedy == cpu.greedy


@pytest.fixture(params=["q4_k_m", "q8_0", "bf16"])
def mix(request: pytest.FixtureRequest) -> Iterator[str]:
    """Types of a file's matrices; what one leaves on the GPU goes before the next comes."""
    yield str(request.param)
    torch.cuda.empty_cache()


def test_logits_in_bf16_are_near_the_exact_ones(name: str, mix: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(name, mix, tmp_path))
    text = PROMPTS[0]
    wanted = run_steps(checkpoint, [text], [[90]], kernels="reference")[0]
    # Read whole, in chunks, in few rows at a time, and token by token.
    for pieces in ([90], [40, 3, 47], [20, 12, 30, 1, 7, 20], [60] + [1] * 30):
        found = run_steps(
            checkpoint, [text], [pieces], device=GPU, dtype="bf16", kv_type="bf16", chunk=128
        )[0]
        error = float((found - wanted).norm() / wanted.norm())
        assert error < LIMIT, f"{error:.4f} in pieces of {pieces}"


def test_rows_in_bf16_do_not_depend_on_others_of_a_step(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(name, "q4_k_m", tmp_path))
    prompts, settings = [text[:7] for text in PROMPTS], {"device": GPU, "dtype": "bf16"}
    together = run_steps(checkpoint, prompts, [[3, 1, 1, 2]] * 3, kv_type="bf16", **settings)
    for prompt, logits in zip(prompts, together, strict=True):
        alone = run_steps(checkpoint, [prompt], [[3, 1, 1, 2]], kv_type="bf16", **settings)[0]
        assert torch.equal(alone, logits)
