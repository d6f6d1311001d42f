"""Models split over several stages give the tokens of one stage."""

import logging
import queue
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent, TokenLogprobs
from headroom.errors import DeviceError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.machine.devices import DeviceSpec
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.split.launch import _way_between, start_pipeline
from headroom.split.pipeline import Pipeline
from tests.families.oracles import PROMPT, variant
from tests.plan.shapes import cpu, host, smollm2
from tests.plan.shapes import gpu as gpu_of
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

# One of each family, with layers that differ in their mixers, caches and networks.
MODELS = (
    "llama",
    "mistral",
    "qwen3-tied",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "laguna",
    "gemma4-31b",
    "gemma4-26b",
    "gemma4-e4b",
)
WAYS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=5, logprobs=1),
    "penalised": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        ignore_eos=True,
        max_tokens=5,
        logprobs=0,
    ),
    "sampled": SamplingParams(
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias={3: 2.0, 9: -100.0},
        seed=7,
        ignore_eos=True,
        max_tokens=5,
        logprobs=2,
    ),
}
SETTINGS: dict[str, Any] = {
    "context": 128,
    "parallel": 3,
    "chunk": 10,
    "cache_tokens": 256,
    "dtype": "f32",
    "kv_type": "f32",
    "threads": 1,
    "routing_stats": "off",
}

Answer = list[tuple[int | None, TokenLogprobs | None, tuple[TokenLogprobs | None, ...]]]


def opened(checkpoint: Checkpoint, **settings: Any) -> tuple[Plan, Pipeline]:
    options = Options(**(SETTINGS | settings))
    model = describe(checkpoint)
    plan = make_plan([model.shape], plan_devices(options), options)
    return plan, start_pipeline(plan, model)


def answers(
    plan: Plan, pipeline: Pipeline, prompts: Sequence[Sequence[int]], together: bool
) -> list[Answer]:
    """Ask each prompt in each way; return all tokens with their probabilities."""
    engine = Engine(pipeline, plan.settings, queue=64)
    asked: list[queue.SimpleQueue[TokenEvent]] = []
    found: list[Answer] = []

    def hear(events: "queue.SimpleQueue[TokenEvent]") -> Answer:
        heard = [events.get(timeout=60)]
        while heard[-1].finish_reason is None:
            heard.append(events.get(timeout=60))
        assert heard[-1].finish_reason == "length", heard[-1].error
        return [(event.token, event.logprobs, event.prompt_logprobs) for event in heard]

    for name, params in WAYS.items():
        for number, prompt in enumerate(prompts):
            asked.append(queue.SimpleQueue())
            request = GenerationRequest(
                id=f"{name} {number}", prompt=tuple(prompt), params=params, stop_ids=frozenset()
            )
            engine.submit(request, asked[-1].put)
            if not together:
                found.append(hear(asked[-1]))
    if together:
        found = [hear(events) for events in asked]
    engine.close()
    return found


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("split") / "m.gguf"
    return open_checkpoint(variant(request.param).save_gguf(path))


PROMPTS = (PROMPT, PROMPT[3:5], PROMPT[5:17])


@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_stages_on_a_cpu_give_the_tokens_of_one(checkpoint: Checkpoint, kernels: str) -> None:
    whole = answers(*opened(checkpoint, kernels=kernels), PROMPTS, together=False)
    for count in (2, 3):
        plan, pipeline = opened(checkpoint, kernels=kernels, device=",".join(["cpu"] * count))
        assert len(plan.devices) == count
        for together in (False, True):
            if together:  # 9 requests, of which 3 run together and come and go
                plan, pipeline = opened(
                    checkpoint, kernels=kernels, device=",".join(["cpu"] * count)
                )
            assert answers(plan, pipeline, PROMPTS, together) == whole


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with stand_in_gpu(monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    ("checkpoint", "devices"),
    [
        ("llama", "cuda:0,cuda:0"),
        ("llama", "cuda:0,cpu"),
        ("llama", "cpu,cuda:0"),
        ("qwen35moe", "cuda:0,cuda:0"),
    ],
    indirect=["checkpoint"],
)
def test_stages_on_gpus_give_the_tokens_of_one(
    checkpoint: Checkpoint, devices: str, gpu: StandInGpu
) -> None:
    given = {"kernels": "reference", "parallel": 2, "expert_budget": "40%"}
    prompts = PROMPTS[:2]
    whole = answers(*opened(checkpoint, device="cuda:0", **given), prompts, together=True)
    assert answers(*opened(checkpoint, device=devices, **given), prompts, together=True) == whole


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "60%"])
@pytest.mark.parametrize(
    "checkpoint", ["qwen3moe", "qwen35moe", "laguna", "gemma4-26b"], indirect=True
)
def test_stages_with_hot_and_cold_experts_give_the_tokens_of_one(
    checkpoint: Checkpoint, budget: str, gpu: StandInGpu
) -> None:
    given = {"kernels": "reference", "expert_budget": budget}
    prompts = [PROMPT[start : start + 2 + 3 * start] for start in range(8)]
    whole = answers(*opened(checkpoint, device="cuda:0", **given), prompts, together=False)
    for devices in ("cuda:0,cuda:0", "cuda:0,cuda:0,cuda:0", "cuda:0,cpu"):
        for together in (False, True):
            split = opened(checkpoint, device=devices, **given)
            assert answers(*split, prompts, together) == whole


# Two stages hold a tied table twice. A float32 one is rounded only where it is the head, so that
# the stages of "llama" give other tokens than one GPU; its memory must be planned all the same.
@pytest.mark.parametrize(
    ("checkpoint", "same"), [("mistral", True), ("llama", False)], indirect=["checkpoint"]
)
def test_stages_of_16_bits_give_the_tokens_of_one_if_rows_are_handed_over_in_float32(
    checkpoint: Checkpoint, same: bool, gpu: StandInGpu
) -> None:
    given = {"dtype": "bf16", "kv_type": "bf16", "parallel": 2, "activation_dtype": "f32"}
    split = answers(
        *opened(checkpoint, device="cuda:0,cuda:0", **given), PROMPTS[:1], together=True
    )
    if same:
        whole = opened(checkpoint, device="cuda:0", **given)
        assert split == answers(*whole, PROMPTS[:1], together=True)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_last_stage_that_cannot_return_logits_is_refused_by_name(checkpoint: Checkpoint) -> None:
    _, pipeline = opened(checkpoint, device="cpu,cpu")
    with pytest.raises(DeviceError, match="cpu is the last stage and has no head"):
        Pipeline(pipeline._stages[:1], pipeline.vocab)


@pytest.mark.parametrize("checkpoint", ["gemma4-e4b"], indirect=True)
def test_the_log_says_how_rows_are_handed_over_and_the_first_step_is_unharmed(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        split = opened(checkpoint, device="cpu,cpu")
    (line,) = (text for text in caplog.messages if text.startswith("hand-over:"))
    assert line.startswith("hand-over: cpu to cpu#2 within its memory, ")
    assert re.search(r" in \d+\.\d{3} ms \(\d+\.\d GB/s\)$", line), line
    whole = answers(*opened(checkpoint), PROMPTS[:1], together=True)
    assert answers(*split, PROMPTS[:1], together=True) == whole


@pytest.mark.parametrize(
    ("devices", "peers", "way"),
    [
        ((gpu_of(24), gpu_of(24, "cuda:1")), True, "by peer copies"),
        ((gpu_of(24), gpu_of(24, "cuda:1")), False, "through host memory"),
        ((gpu_of(24), gpu_of(24, "cuda:0#2")), False, "within its memory"),
        ((gpu_of(24), cpu(24)), True, "over the GPU's link"),
    ],
)
def test_the_way_between_two_devices_has_a_name(
    devices: tuple[DeviceSpec, DeviceSpec], peers: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: peers)
    plan = make_plan([smollm2()], [*devices, host(64)], Options())
    assert _way_between(*plan.devices) == way
