"""Features: the rows between layers are transformers' own, however the layers are split."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.errors import PlanError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.plan.settings import FeatureRequest
from headroom.split.choice import make_worker_plan
from headroom.split.launch import start_pipeline
from headroom.split.pipeline import Pipeline
from headroom.split.workers import Workers, end_on_error, open_worker_pipeline
from tests.families.oracles import PROMPT, variant
from tests.running import PAGE_SIZE, running
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

SETTINGS: dict[str, Any] = {
    "context": 128,
    "parallel": 2,
    "chunk": 16,
    "dtype": "f32",
    "kv_type": "f32",
    "threads": 1,
}
PIECES = (9, 1, 6, 8)  # rows of the steps that read PROMPT
# Relative errors of rounded values. In q8_0 a value is off by half a step, which is a 127th of the
# largest of 32 values, and the step is rounded to f16: both errors are relative to the largest.
ROUNDING = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254 + 2**-11}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A dense model, one with norms around its parts, and a recurrent one."""
    folder = tmp_path_factory.mktemp("features")
    return {
        name: open_checkpoint(variant(name).save_gguf(folder / f"{name}.gguf"))
        for name in ("llama", "gemma4-31b", "qwen35")
    }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with stand_in_gpu(monkeypatch) as made:
        yield made


def opened(
    checkpoint: Checkpoint, request: FeatureRequest | None, **settings: Any
) -> tuple[Plan, Pipeline]:
    options = Options(**(SETTINGS | settings))
    model = describe(checkpoint)
    plan = make_plan([model.shape], plan_devices(options), options, request)
    return plan, start_pipeline(plan, model)


def features(
    checkpoint: Checkpoint, request: FeatureRequest, **settings: Any
) -> torch.Tensor:  # [tokens, layers, hidden]
    return read_features(*opened(checkpoint, request, **settings))


def read_features(plan: Plan, pipeline: Pipeline) -> torch.Tensor:
    """Read a prompt in several steps; return the features of all its tokens."""
    assert pipeline.features is not None
    planned = sum(device.allocated.get("features", 0) for device in plan.devices)
    assert pipeline.allocated["features"] == planned > 0
    sequence, found = running(PROMPT, [1, 0]), []
    for rows in PIECES:
        with torch.inference_mode():
            pipeline.step(make_batch([Turn(sequence, rows)], PAGE_SIZE))
        found.append(pipeline.features.read(rows, "cpu"))
        sequence.cached += rows
    pipeline.close()
    return torch.cat(found)


@pytest.mark.parametrize("name", ["llama", "gemma4-31b", "qwen35"])
def test_features_are_the_hidden_states_of_transformers(
    name: str, checkpoints: dict[str, Checkpoint]
) -> None:
    model = variant(name).model()
    with torch.inference_mode():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    last = len(states) - 2  # transformers norms the output of this layer
    layers = tuple(range(last))[::-1]  # in an order of their own
    found = features(checkpoints[name], FeatureRequest(layers))
    for at, layer in enumerate(layers):
        torch.testing.assert_close(found[:, at], states[layer + 1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("handover", ["f32", "f16", "bf16"])
def test_features_of_a_split_model_are_those_of_one_stage(
    handover: str, kernels: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints["llama"]
    count = len(describe(checkpoint).shape.layers)
    request = FeatureRequest((count - 1, 0))
    whole = features(checkpoint, request, kernels=kernels)
    split = features(
        checkpoint, request, kernels=kernels, device="cpu,cpu", activation_dtype=handover
    )
    if handover == "f32":
        assert torch.equal(split, whole)
    assert torch.equal(split[:, 1], whole[:, 1])  # of the first stage
    assert float((split - whole).norm() / whole.norm()) < 4 * ROUNDING[handover] + 1e-9


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_narrow_features_are_rounded_once(kind: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["llama"]
    exact = features(checkpoint, FeatureRequest((0, 1)))
    found = features(checkpoint, FeatureRequest((0, 1), kind), device="cpu,cpu")
    largest = exact.view(*exact.shape[:2], -1, 32).abs().amax(-1, keepdim=True)
    bound = largest.expand(*largest.shape[:-1], 32).flatten(-2) * ROUNDING[kind]
    if kind != "q8_0":
        bound = exact.abs() * ROUNDING[kind]
        plain = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
        assert torch.equal(found, exact.to(plain).float())
    assert bool(((found - exact).abs() <= 1.01 * bound + 1e-9).all())


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,cuda:0", "cpu,cuda:0", "cuda:0,cpu"])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_features_of_gpus_are_those_of_a_cpu(
    devices: str, kind: str, checkpoints: dict[str, Checkpoint], gpu: StandInGpu
) -> None:
    checkpoint, request = checkpoints["llama"], FeatureRequest((1, 0), kind)
    given = {"kernels": "reference"}
    wanted = features(checkpoint, request, **given)
    found = features(checkpoint, request, device=devices, **given)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_without_a_request_nothing_is_kept_or_planned(checkpoints: dict[str, Checkpoint]) -> None:
    plan, pipeline = opened(checkpoints["llama"], None)
    assert pipeline.features is None
    assert "features" not in {line.name for line in plan.devices[0].lines}
    (stage,) = pipeline._stages
    model = stage._model  # type: ignore[attr-defined]
    assert model._layers is model._blocks


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (FeatureRequest((99,)), "Features of the layers 99 were asked for"),
        (FeatureRequest((0, 0)), "Features of the layers 0, 0 were asked for"),
        (FeatureRequest(()), "Features of the layers none were asked for"),
        (FeatureRequest((0,), "q4_0"), "Features cannot be kept in q4_0"),
    ],
)
def test_layers_and_types_that_cannot_be_had_are_refused(
    request_: FeatureRequest, told: str, checkpoints: dict[str, Checkpoint]
) -> None:
    with pytest.raises(PlanError, match=told):
        opened(checkpoints["llama"], request_)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_features_of_workers_are_those_of_one_stage(
    kind: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints["llama"]
    model = describe(checkpoint)
    count = len(model.shape.layers)
    request = FeatureRequest((count - 1, 0), kind)
    options = Options(**(SETTINGS | {"workers": "2"}))
    workers = Workers(options)
    with end_on_error(workers):
        workers.start()
        plan = make_worker_plan(model.shape, workers.devices, options, request)
        pipeline = open_worker_pipeline(workers, plan, model, options)
    assert len(plan.devices) == 2
    assert torch.equal(read_features(plan, pipeline), features(checkpoint, request))
