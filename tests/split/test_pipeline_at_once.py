"""Stages on different devices of one process work at the same time, and change no answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.experts.traces.taps import TraceRecorder
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.layers.batch import Batch
from headroom.layers.features import ModelFeatures
from headroom.llm import LLM
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.plan.settings import FeatureRequest
from headroom.split.gpu_stage import GpuStage
from headroom.split.launch import start_pipeline, works_at_once
from headroom.split.pipeline import Pipeline
from headroom.split.stage import CpuResult, CpuStage
from tests.engine.test_prefixes import SETTINGS as PREFIX_SETTINGS
from tests.engine.test_prefixes import Asker, check_conversation
from tests.families.oracles import PROMPT, variant
from tests.plan.shapes import cpu, host, smollm2
from tests.plan.shapes import gpu as gpu_of
from tests.split.test_pipeline import PROMPTS, SETTINGS, answers, opened
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

GIVEN: dict[str, Any] = {"kernels": "reference", "parallel": 4, "chunk": 4}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder: Path = tmp_path_factory.mktemp("at_once")
    return {
        name: open_checkpoint(variant(name).save_gguf(folder / f"{name}.gguf"))
        for name in ("llama", "qwen35moe", "gemma4-e4b")
    }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with stand_in_gpu(monkeypatch) as made:
        yield made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Which kind of stage has run, on the first positions of which sequences' rows."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def note(of: type[Any], name: str, stage: str) -> None:
        call: Callable[..., Any] = getattr(of, name)

        def noted(self: Any, batch: Batch, *arguments: Any) -> Any:
            found.append((stage, tuple(span.start for span in batch.spans)))
            return call(self, batch, *arguments)

        monkeypatch.setattr(of, name, noted)

    note(GpuStage, "run", "gpu")
    note(GpuStage, "step", "gpu")
    note(CpuStage, "run", "cpu")
    note(CpuStage, "step", "cpu")
    return found


def shared(plan: Plan, pipeline: Pipeline, depth: int) -> tuple[Plan, Pipeline]:
    """Let sequences be shared among steps, whether that pays on these devices or not."""
    pipeline.depth, pipeline._pays_to_share = depth, lambda sequences, steps: True  # type: ignore[assignment]
    return plan, pipeline


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("llama", "cuda:0,cpu"),
        ("llama", "cpu,cuda:0"),
        ("llama", "cuda:0,cuda:0"),
        pytest.param("llama", "cuda:0,cpu,cpu", marks=pytest.mark.slow),
        pytest.param("llama", "cpu,cuda:0,cpu", marks=pytest.mark.slow),
        pytest.param("qwen35moe", "cuda:0,cpu", marks=pytest.mark.slow),
        pytest.param("gemma4-e4b", "cuda:0,cpu", marks=pytest.mark.slow),
    ],
)
def test_answers_do_not_depend_on_stages_that_work_at_once(
    name: str, devices: str, checkpoints: dict[str, Checkpoint], gpu: StandInGpu
) -> None:
    given = GIVEN | ({"expert_budget": "40%"} if name == "qwen35moe" else {})
    whole = answers(*opened(checkpoints[name], device="cuda:0", **given), PROMPTS, together=False)
    split = shared(*opened(checkpoints[name], device=devices, **given), 2)
    assert answers(*split, PROMPTS, together=True) == whole


def test_a_gpu_computes_the_next_chunk_of_a_prompt_before_the_cpu_computes_the_last_one(
    checkpoints: dict[str, Checkpoint], gpu: StandInGpu, calls: list[tuple[str, tuple[int, ...]]]
) -> None:
    plan, pipeline = opened(checkpoints["llama"], device="cuda:0,cpu", **GIVEN)
    calls.clear()  # steps that were captured
    answers(plan, pipeline, [PROMPT], together=False)
    first = calls[: 2 * (len(PROMPT) // 4)]
    assert first[:5] == [
        ("gpu", (0,)), ("gpu", (4,)), ("cpu", (0,)), ("gpu", (8,)), ("cpu", (4,)),
    ]  # fmt: skip


@pytest.mark.parametrize("pays", [True, False])
def test_sequences_that_decode_are_shared_among_steps_if_that_pays(
    pays: bool,
    checkpoints: dict[str, Checkpoint],
    gpu: StandInGpu,
    calls: list[tuple[str, tuple[int, ...]]],
) -> None:
    plan, pipeline = opened(checkpoints["llama"], device="cuda:0,cpu", **GIVEN)
    assert pipeline.depth == 2
    pipeline._pays_to_share = lambda sequences, steps: pays  # type: ignore[assignment]
    calls.clear()
    answers(plan, pipeline, [PROMPT[:4]], together=True)  # three ways to draw
    decodes = [(stage, starts) for stage, starts in calls if min(starts) >= 4]
    overlaps = [one for one, after in pairwise(decodes) if one[0] == after[0] == "gpu"]
    assert bool(overlaps) == pays
    assert max(len(starts) for _, starts in decodes) == (2 if pays else 3)


@pytest.mark.parametrize(
    ("devices", "several"),
    [
        ((gpu_of(24), gpu_of(24, "cuda:1")), True),
        ((gpu_of(24), cpu(24)), True),
        ((gpu_of(24), gpu_of(24, "cuda:0#2")), False),
        ((cpu(24), replace(cpu(24), name="cpu#2")), False),
    ],
)
def test_only_different_devices_work_at_once(devices: tuple[Any, Any], several: bool) -> None:
    behind = () if any(device.kind == "cpu" for device in devices) else (host(64),)
    plan = make_plan([smollm2()], [*devices, *behind], Options())
    assert works_at_once(plan.devices) == several


def test_recorded_picks_keep_the_order_of_steps(
    checkpoints: dict[str, Checkpoint], gpu: StandInGpu
) -> None:
    options = Options(**(SETTINGS | GIVEN | {"device": "cuda:0,cpu"}))
    model = describe(checkpoints["qwen35moe"])
    plan = make_plan([model.shape], plan_devices(options), options)
    pipeline = start_pipeline(plan, model, tap=TraceRecorder())
    assert pipeline.depth == 1
    pipeline.close()


@pytest.mark.slow
def test_a_warm_answer_of_stages_that_work_at_once_is_the_cold_one(
    checkpoints: dict[str, Checkpoint], gpu: StandInGpu
) -> None:
    """A snapshot is taken right after a prompt's last chunk was launched on the GPU."""
    given = PREFIX_SETTINGS | {"kernels": "reference"}
    with LLM(str(checkpoints["qwen35moe"].path), **given, device="cuda:0,cpu") as llm:
        assert llm.engine._pipeline.depth == 2
        check_conversation(OneAsker(llm), "sampled")


class OneAsker(Asker):
    """Asks the engine of a loaded model."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine, self.count = llm, llm.engine, 0


class PlayedStage:
    """A stage that notes its calls; `fails` names the step, by its first position, that does."""

    has_head = True

    def __init__(
        self, device: str, log: list[str], drawn: torch.Tensor | None = None, fails: int = -1
    ) -> None:
        self.device, self.drawn = device, drawn
        self._log, self._fails = log, fails
        moves = ("copy_page", "save_page", "load_page", "save_state", "load_state")
        self.caches = SimpleNamespace(**{name: partial(self._move, name) for name in moves})

    def _move(self, name: str, *arguments: int) -> None:
        self._log.append(name)

    def receive(self, received: int) -> None:
        self._log.append(f"{self.device} receives {received}")

    def run(self, batch: Batch, received: int | None = None) -> int:
        step = int(batch.positions[0])
        self._log.append(f"{self.device} runs {step}")
        if step == self._fails:
            raise MemoryError(f"step {step}")
        return step

    def step(self, batch: Batch, draws: Sequence[Any] = (), received: int | None = None) -> Any:
        step = self.run(batch, received)
        hidden = torch.full((1, 2), float(step))
        return CpuResult(hidden, lambda rows: rows, lambda rows: rows)


def played(*stages: PlayedStage) -> Pipeline:
    return Pipeline(stages, vocab=8, depth=2)  # type: ignore[arg-type]


def step_at(position: int, token: int = 1) -> Batch:
    return Batch(
        tokens=torch.tensor([token]),
        positions=torch.tensor([position]),
        kv_slots=torch.tensor([0]),
        spans=(),
        output_rows=torch.tensor([0]),
    )


def test_results_of_late_steps_are_those_of_their_own_rows_and_errors_hit_their_own_step() -> None:
    log: list[str] = []
    pipeline = played(PlayedStage("cuda:0", log), PlayedStage("cpu", log, fails=1))
    results = [pipeline.step(step_at(position)) for position in range(4)]
    assert log == [
        "cuda:0 runs 0",
        "cpu receives 0", "cuda:0 runs 1", "cpu runs 0",
        "cpu receives 1", "cuda:0 runs 2", "cpu runs 1",
        "cpu receives 2", "cuda:0 runs 3", "cpu runs 2",
    ]  # fmt: skip
    with pytest.raises(MemoryError, match="step 1"):
        results[1].tokens()
    for at in (2, 3):
        assert results[at].tokens() == [None]
        assert results[at].logits([0]).tolist() == [[at, at]]
    assert log[-2:] == ["cpu receives 3", "cpu runs 3"]


def test_a_step_that_fails_on_the_gpu_leaves_the_one_before_it_right() -> None:
    log: list[str] = []
    pipeline = played(PlayedStage("cuda:0", log, fails=1), PlayedStage("cpu", log))
    first = pipeline.step(step_at(0))
    with pytest.raises(MemoryError):
        pipeline.step(step_at(1))
    assert first.hidden.tolist() == [[0, 0]]
    assert log == ["cuda:0 runs 0", "cpu receives 0", "cuda:0 runs 1", "cpu runs 0"]


def test_caches_and_features_are_used_after_the_cpu_has_run_what_was_launched() -> None:
    log: list[str] = []
    features = ModelFeatures(FeatureRequest(()), ())
    stages = PlayedStage("cuda:0", log), PlayedStage("cpu", log)
    pipeline = Pipeline(stages, vocab=8, depth=2, features=features)  # type: ignore[arg-type]
    moves: dict[str, Callable[[], None]] = {
        "copy_page": lambda: pipeline.copy_page(1, 2),
        "save_page": lambda: pipeline.save_page(1, 2),
        "load_page": lambda: pipeline.load_page(1, 2),
        "save_state": lambda: pipeline.save_state(1, 2, 3),
        "load_state": lambda: pipeline.load_state(1, 2, 3),
    }
    for step, (name, move) in enumerate(moves.items()):
        pipeline.step(step_at(step))
        move()
        assert log[-3:] == [f"cpu runs {step}", name, name]
    pipeline.step(step_at(5))
    with pytest.raises(KeyError):  # no features were asked for
        features.stored(0, 1)
    assert log[-1] == "cpu runs 5"
    pipeline.step(step_at(6))
    with pytest.raises(RuntimeError):
        features.read(1, "cpu")
    assert log[-1] == "cpu runs 6"
    files = SimpleNamespace(page_bytes=0, snapshot_bytes=0)
    for stage in stages:
        stage.cache_files = files  # type: ignore[attr-defined]
    pipeline.step(step_at(7))
    pipeline.cache_files.settle()
    assert log[-1] == "cpu runs 7"


def test_the_first_gpu_waits_for_tokens_of_the_last_one_only_if_the_step_names_them() -> None:
    log: list[str] = []
    first = PlayedStage("cuda:0", log, drawn=torch.zeros(2, dtype=torch.int64))
    last = PlayedStage("cuda:1", log, drawn=torch.tensor([7, 8]))
    pipeline = played(first, last)
    pipeline.step(step_at(0, token=5))
    assert first.drawn is not None
    assert first.drawn.tolist() == [0, 0]
    pipeline.step(step_at(1, token=-2))
    assert first.drawn.tolist() == [7, 8]
