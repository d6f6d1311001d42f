"""Loading tells how far it is, and how fast it was."""

import logging
import re
from pathlib import Path

import pytest

from headroom.formats.checkpoint import open_checkpoint
from headroom.llm import LLM
from headroom.memory.plan import make_plan
from headroom.memory.targets import plan_devices
from headroom.models.describe import describe
from headroom.options import Options
from headroom.split.launch import WEIGHT_LINES, start_pipeline
from headroom.units import gib


def test_progress_goes_from_nothing_to_all_weights_of_the_plan(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, options = describe(open_checkpoint(tiny_path)), Options(context=128, threads=1)
    plan = make_plan([model.shape], plan_devices(options), options)
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "headroom"):
        start_pipeline(plan, model, lambda done, total: seen.append((done, total)))
    lines = plan.devices[0].allocated
    weights = sum(lines.get(line, 0) for line in WEIGHT_LINES)
    done = [bytes_done for bytes_done, _ in seen]
    assert {total for _, total in seen} == {weights}
    assert done == sorted(done)
    assert (done[0], done[-2], done[-1]) == (0, weights, weights)
    assert len(set(done)) > len(model.config.layers)
    (line,) = (text for text in caplog.messages if text.startswith("load: "))
    assert re.fullmatch(rf"load: {gib(weights)} on cpu in \d+\.\d s \(\d+\.\d GB/s\)", line)


def test_the_python_interface_tells_it_too(tiny_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with LLM(str(tiny_path), context=64, threads=1, progress=lambda *numbers: seen.append(numbers)):
        assert seen[0][0] == 0
        assert seen[-1] == (seen[0][1], seen[0][1])
