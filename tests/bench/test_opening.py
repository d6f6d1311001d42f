"""Which device a bench measures."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from headroom.bench import run
from headroom.bench.opening import read_model
from headroom.options import Options


def test_the_device_is_the_one_that_a_run_would_choose(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, asked = read_model(tiny_path).shape, []

    def chosen(shape: object, options: Options) -> SimpleNamespace:
        asked.append(options.device)
        return SimpleNamespace(devices=[SimpleNamespace(name="cuda:1")])

    monkeypatch.setattr(run, "make_run_plan", chosen)
    assert run.on_device(Options(context=64), shape) == Options(context=64, device="cuda:1")
    assert run.on_device(Options(device="cpu"), shape) == Options(device="cpu")
    assert asked == [None]
