"""SmolLM2 from its real file: greedy answers and logits equal those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headroom.engine.request import SamplingParams
from headroom.families.files import open_checkpoint
from headroom.kernels.native.module import MODULE
from headroom.llm import LLM
from tests.golden import CHATS, PLAIN
from tests.running import run_steps

PROMPT_TOKENS = 32  # that every prompt has at least
NEW_TOKENS = 32
CLOSE = 1e-3  # logits nearer than this may swap places
# Of the logits' norm, where products round their activations to so many bits; measured for 8 bits:
# 0.034 to 0.038. With 24 bits the sums differ, and no rounding shows.
ROUNDING = {"int8": 0.05, "int24": 2e-5}


# Types that choose transformers' tokens; without the C++ module there is one.
CHOOSING = [pytest.param("f32", marks=pytest.mark.slow), "int24"] if MODULE else ["f32"]


@pytest.fixture(scope="module", params=CHOOSING)
def compute_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def answers(compute_type: str, smollm2_path: Path) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Prompts and our greedy continuations of them, in each type."""
    settings = {"context": 512, "parallel": 8, "kv_type": "f32", "dtype": compute_type}
    with LLM(str(smollm2_path), **settings) as llm:
        prompts = [llm.tokenizer.encode(text) for text in PLAIN]
        prompts += [llm.encode_chat(messages) for messages in CHATS]
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        done = llm.generate(prompts, params)
        yield [(p, list(d.token_ids)) for p, d in zip(prompts, done, strict=True)]


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    return model.eval()


def oracle_logits(oracle: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def test_greedy_continuations_equal_transformers(answers, oracle) -> None:
    assert len(answers) >= 20
    for prompt, continuation in answers:
        assert len(prompt) >= PROMPT_TOKENS
        assert len(continuation) == NEW_TOKENS
        logits = oracle_logits(oracle, prompt + continuation)[len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        # The token is transformers' own, or one that it finds equally good.
        assert float((best - chosen).max()) < CLOSE


@pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(4, id="some")]
)
def test_logits_equal_transformers(
    answers, oracle, compute_type: str, smollm2_path: Path, every: int
) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    rows = [prompt + continuation for prompt, continuation in answers][::every]
    for tokens in rows:
        settings = {"context": 512, "parallel": 1, "dtype": compute_type}
        ours = run_steps(checkpoint, [tokens], [[len(tokens)]], **settings)[0]
        torch.testing.assert_close(ours, oracle_logits(oracle, tokens), atol=CLOSE, rtol=0)


def test_cpp_kernels_choose_the_tokens_of_the_reference(answers, smollm2_path: Path) -> None:
    prompts = [prompt for prompt, _ in answers][::6]
    settings = {"context": 512, "parallel": 4, "kv_type": "f32", "dtype": "f32"}
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(smollm2_path), kernels="reference", **settings) as llm:
        plain = [list(done.token_ids) for done in llm.generate(prompts, params)]
    assert plain == [continuation for _, continuation in answers][::6]


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize("rounded_type", ROUNDING)
def test_logits_of_rounded_products_stay_near_those_of_floats(
    answers, smollm2_path: Path, rounded_type: str
) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    for prompt, continuation in answers[::8]:
        tokens = prompt + continuation
        exact, rounded = (
            run_steps(checkpoint, [tokens], [[len(tokens)]], context=512, parallel=1, dtype=dtype)[
                0
            ]
            for dtype in ("f32", rounded_type)
        )
        assert float((rounded - exact).norm() / exact.norm()) < ROUNDING[rounded_type]
