"""Loading reports its progress and its speed."""

import logging
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from headroom.families.files import open_checkpoint
from headroom.llm import LLM
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.split import launch
from headroom.split.launch import WEIGHT_LINES, start_pipeline
from headroom.split.pipeline import LoadTimes
from headroom.units import gib
from tests.stand_in.gpu import stand_in_gpu
from tests.synth_models import write_model


def test_progress_goes_from_nothing_to_all_weights_of_the_plan(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, options = describe(open_checkpoint(tiny_path)), Options(context=128, threads=1)
    plan = make_plan([model.shape], plan_devices(options), options)
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "headroom"):
        start_pipeline(plan, model, lambda *told: seen.append(told[:2]))
    lines = plan.devices[0].allocated
    weights = sum(lines.get(line, 0) for line in WEIGHT_LINES)
    done = [bytes_done for bytes_done, _ in seen]
    assert {total for _, total in seen} == {weights}
    assert done == sorted(done)
    assert (done[0], done[-2], done[-1]) == (0, weights, weights)
    assert len(set(done)) > len(model.config.layers)
    (line,) = (text for text in caplog.messages if text.startswith("load: "))
    assert re.fullmatch(rf"load: {gib(weights)} on cpu in \d+\.\d s \(\d+\.\d GB/s\)", line)


def test_the_python_interface_reports_the_progress_of_loading_too(tiny_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with LLM(str(tiny_path), context=64, threads=1, progress=lambda *numbers: seen.append(numbers)):
        assert seen[0][0] == 0
        assert seen[-1] == (seen[0][1], seen[0][1])


def test_weights_and_captures_are_timed_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model("llama", "q4_k_m", tmp_path, few_layers=True)
    model = describe(open_checkpoint(path))
    clock = count(step=2.5)  # every look at it is 2.5 s after the last one
    monkeypatch.setattr(launch, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        options = Options(context=256, parallel=1)
        plan = make_plan([model.shape], [gpu.card.spec], options)
        seen: list[tuple[int, int, str]] = []

        def note(done: int, total: int, step: str = "loading") -> None:
            seen.append((done, total, step))

        pipeline = start_pipeline(plan, model, note)
    captures = [(done, total) for done, total, step in seen if step == "capturing"]
    assert captures == [(done, len(captures) - 1) for done in range(len(captures))]
    assert len(captures) > 5
    assert [step for *_, step in seen] == sorted((step for *_, step in seen), reverse=True)
    lines = plan.devices[0].allocated
    weights = sum(lines.get(line, 0) for line in WEIGHT_LINES)
    times = pipeline.load_times
    assert times == LoadTimes(weights_bytes=weights, weights_s=2.5, capture_s=2.5)
    assert times.bytes_per_s == weights / 2.5
    assert LoadTimes().bytes_per_s == 0  # of a pipeline for which nothing was loaded


def test_a_cpu_without_the_cpp_module_is_reported_at_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "MODULE", None)
    monkeypatch.setattr(launch, "MISSING", "not built")
    with caplog.at_level(logging.WARNING):
        launch.warn_of_slow_kernels("cpu")
        launch.warn_of_slow_kernels("cuda:0")
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: the C++ module is not built; running on slow reference kernels"
    ]
