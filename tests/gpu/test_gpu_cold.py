"""Every family with experts on a GPU, some of them cold, through the whole engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headroom.kernels.native.module import MODULE
from headroom.llm import LLM
from tests.gpu import cold_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(MODULE is None, reason="the C++ module was not built"),
]
CPU_COLD = {"expert_budget": "30%", "cold": "cpu"}


@pytest.fixture(scope="module", params=list(cases.LIMITS))
def name(request: pytest.FixtureRequest) -> str:
    """A model's name."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are."""
    return tmp_path_factory.mktemp("cold")


@pytest.fixture(scope="module")
def path(name: str, folder: Path) -> Path:
    """A model's file, with packed matrices."""
    return cases.model_file(name, folder)


@pytest.fixture(scope="module")
def exact(path: Path) -> cases.Tokens:
    """What the CPU says with plain kernels."""
    return cases.exact_answers(path)


@pytest.fixture(scope="module")
def all_hot(path: Path) -> list[torch.Tensor]:
    """Logits in bf16 when no expert is cold."""
    return cases.logits(path)


@pytest.mark.parametrize("cold", cases.PATHS)
@pytest.mark.parametrize("share", [*cases.SHARES, "100%"])
def test_tokens_in_f32_are_the_same_whatever_is_hot(
    path: Path, exact: cases.Tokens, share: str, cold: str
) -> None:
    assert cases.same_tokens(path, exact, expert_budget=share, cold=cold) == ""


@pytest.mark.parametrize("share", cases.SHARES)
def test_tokens_in_f32_are_the_same_where_both_share_a_layer(
    path: Path, exact: cases.Tokens, share: str
) -> None:
    assert cases.same_tokens_when_shared(path, exact, share) == ""


def test_tokens_in_f32_are_the_same_where_experts_change_places_within_requests(
    path: Path, exact: cases.Tokens
) -> None:
    given = {"expert_budget": "30%", "cold": "gpu", "swap_every": "4"}
    assert cases.same_tokens(path, exact, **given) == ""


@pytest.mark.parametrize("share", cases.SHARES)
def test_a_gpu_alone_says_the_same_to_the_bit(
    path: Path, all_hot: list[torch.Tensor], share: str
) -> None:
    assert cases.same_bits(path, all_hot, share) == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_budget": "0%", "cold": "cpu"},
        CPU_COLD,
        {"expert_budget": "60%", "cold": "auto"},
        {"expert_budget": "30%", "no_pin": True},
        {"expert_budget": "30%", "keep_host_copy": True},
    ],
)
def test_logits_are_near_where_a_cpu_helps(
    name: str, path: Path, all_hot: list[torch.Tensor], settings: dict[str, object]
) -> None:
    assert cases.near(path, all_hot, cases.LIMITS[name], **settings) == ""


@pytest.mark.parametrize("share", cases.SHARES)
def test_logits_are_near_where_both_share_a_layer(
    name: str, path: Path, all_hot: list[torch.Tensor], share: str
) -> None:
    assert cases.near_when_shared(path, all_hot, cases.LIMITS[name], share) == ""


@pytest.mark.parametrize("settings", [{}, cases.EXACT])
def test_cold_experts_can_be_left_out(name: str, path: Path, settings: dict[str, object]) -> None:
    all_hot = cases.logits(path, **settings)
    assert cases.drops(path, all_hot, cases.LIMITS[name], **settings) == ""


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLM]:
    """An engine that asks the CPU in captured steps."""
    path = cases.model_file("qwen35moe-wide", folder)
    with cases.opened(path, device=cases.GPU, context=2048, **CPU_COLD) as llm:
        yield llm


def test_a_request_is_told_what_its_cold_experts_cost(engine: LLM) -> None:
    assert cases.told_experts(engine) == ""


def test_thousands_of_captured_steps_ask_the_cpu(engine: LLM) -> None:
    assert cases.long_answers(engine) == ""


def test_no_step_waits_for_a_cpu_that_sleeps(engine: LLM) -> None:
    assert cases.with_pauses(engine) == ""


def test_a_cancelled_request_leaves_others_alone(engine: LLM) -> None:
    assert cases.cancels(engine) == ""


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_ends_with_its_threads(folder: Path, busy: bool) -> None:
    assert cases.closes(cases.model_file("qwen35moe-wide", folder), busy=busy) == ""


@pytest.mark.parametrize("cold", ["cpu", "gpu", "drop"])
def test_an_engine_keeps_to_the_plan_of_a_small_card(folder: Path, cold: str) -> None:
    path = cases.model_file("qwen3moe", folder)
    assert cases.keeps_to_plan(path, expert_budget="30%", cold=cold) == ""
