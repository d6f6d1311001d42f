"""benchmarks/experts.py: what runs first, what is left out, and what the table says."""

import argparse
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import experts
from benchmarks.experts import (
    CONFIGS,
    FIRST_S,
    HEADS,
    PREPARE_S,
    Bench,
    Config,
    Result,
    chosen,
    expected_s,
    last_json,
    run_all,
    run_child,
    table,
)
from headroom.cli import bench, calibrate, profile, synth


class Clock:
    """Time that only what is run uses up."""

    def __init__(self, left: float, takes: float) -> None:
        self.left, self.takes = left, takes
        self.prepared: list[str] = []
        self.failing: set[str] = set()

    def left_s(self) -> float:
        return self.left

    def prepare(self, what: str) -> bool:
        self.prepared.append(what)
        self.left -= PREPARE_S[what]
        return what not in self.failing

    def run(self, config: Config) -> Result:
        self.left -= self.takes
        status = "failed" if config.name in self.failing else "done"
        return Result(config.name, status, self.takes)

    def all(self, configs: tuple[Config, ...] = CONFIGS) -> list[Result]:
        return run_all(configs, self.left_s, self.prepare, self.run)


def test_the_figures_that_must_be_reached_come_first() -> None:
    assert [config.name for config in CONFIGS[:6]] == [
        "60-uniform-auto", "60-skewed-auto", "0-uniform-auto", "60-skewed-auto-even",
        "card-12GiB", "card-8GiB",
    ]  # fmt: skip
    assert [config.must[0] for config in CONFIGS[:3]] == [130, 250, 65]
    assert len({config.name for config in CONFIGS}) == len(CONFIGS)


def test_all_run_when_there_is_time_and_models_are_made_once() -> None:
    clock = Clock(left=10_000, takes=30)
    assert [result.status for result in clock.all()] == ["done"] * len(CONFIGS)
    assert clock.prepared == ["uniform", "skewed", "profile"]


def test_what_does_not_fit_is_left_out_and_what_does_still_runs() -> None:
    # Enough for the first, and then for one that needs no other model.
    clock = Clock(left=FIRST_S + PREPARE_S["uniform"] + 20, takes=30)
    results = clock.all()
    assert [result.status for result in results[:3]] == ["done", "left out", "done"]
    assert results[1].log[0].startswith("it takes about 83 s and 50 s are left")
    assert clock.left >= 0
    assert clock.prepared == ["uniform"]
    assert {result.status for result in Clock(left=10, takes=30).all()} == {"left out"}


def test_one_failure_loses_nothing_else() -> None:
    clock = Clock(left=10_000, takes=30)
    clock.failing = {"skewed", "0-uniform-auto"}
    results = {result.name: result for result in clock.all()}
    for name in ("60-skewed-auto", "60-skewed-auto-even"):
        assert results[name].log == ["skewed could not be made"]
    assert "profile" not in clock.prepared
    assert results["0-uniform-auto"].status == "failed"
    assert results["card-8GiB"].status == "done"
    clock = Clock(left=10_000, takes=30)
    clock.failing = {"profile"}
    results = {result.name: result for result in clock.all()}
    failed = {name: one.log for name, one in results.items() if one.status == "failed"}
    skewed = [config.name for config in CONFIGS if config.stats]
    assert failed == {name: ["profile could not be made"] for name in skewed}
    assert results["60-skewed-auto-even"].status == "done"


def test_later_runs_are_expected_to_take_what_earlier_ones_took() -> None:
    config = CONFIGS[0]
    assert expected_s(config, [], {"uniform": True}) == FIRST_S
    assert expected_s(config, [], {}) == FIRST_S + PREPARE_S["uniform"]
    assert expected_s(config, [90.0, 40.0, 50.0], {"uniform": True}) == pytest.approx(55.0)


def test_a_child_may_fail_or_take_too_long() -> None:
    done = run_child("a", [sys.executable, "-c", "print('x'); print('{\"a\": 1}')"], 30)
    assert (done.status, done.report) == ("done", {"a": 1})
    failed = run_child("b", [sys.executable, "-c", "raise SystemExit('error: no')"], 30)
    assert (failed.status, failed.log) == ("failed", ["error: no", "exit code 1"])
    slow = "import sys, time; print('half', file=sys.stderr, flush=True); time.sleep(60)"
    late = run_child("c", [sys.executable, "-c", slow], 1.0)
    assert late.status == "too long"
    assert late.report is None


def test_the_last_object_of_an_output_counts() -> None:
    assert last_json('{"a": 1}\nwords\n{"b": 2}\n') == {"b": 2}
    assert last_json("{broken\n") is None
    assert last_json("") is None


REPORT: dict[str, Any] = {
    "load_s": 7.26,
    "prompts": [
        {"tokens": 512, "tokens_per_s": 1600.4, "experts": None},
        {
            "tokens": 2048, "tokens_per_s": 4000.0,
            "experts": {"cold_bytes_per_s": {"stream": 44e9}, "bandwidth_share": {"stream": 0.8}},
        },
    ],
    "decodes": [
        {
            "batch": 1, "context": 32, "tokens_per_s": 200.04, "step_s": 0.005,
            "experts": {
                "hit_rate": 0.601, "cold_bytes_per_s": {"gpu": 10e9, "cpu": 50e9},
                "bandwidth_share": {"gpu": 0.2}, "ms_per_token": {"hot": 2.0, "wait": 0.5},
            },
        }
    ],
    "parts": [{"what": "decode", "gpu_share": 0.97}, {"what": "prompt", "gpu_share": 0.6}],
    "experts": {"layers_by_path": {"cpu": 38, "gpu": 2}},
    "memory": {"peak_bytes": 12.3e9, "planned_bytes": 12.5e9},
}  # fmt: skip


def test_the_table_has_every_figure_beside_what_it_must_be() -> None:
    config = CONFIGS[0]
    lines = table([config], [Result(config.name, "done", report=REPORT)])
    assert lines[1].count("|") == lines[2].count("|") == len(HEADS) + 1
    assert lines[2] == (
        "| 60 % | uniform | auto (cpu 38, gpu 2) | 200.0 (must 130, aim 220) | "
        "1600 (must 1500, aim 3000) | 4000 (must 3500, aim 8000) | 60 % | 97 % / 60 % | 10 % | "
        "10.0 (20 %) | 44.0 (80 %) | 50.0 | 12.30 of 12.50 | 7.3 |"
    )


def test_the_table_takes_reports_with_less() -> None:
    small = REPORT | {"parts": [], "prompts": [], "experts": None, "decodes": []}
    results = [Result("a", "done", report=small), Result("b", "left out"), Result("c", "done")]
    lines = table([CONFIGS[6], CONFIGS[7], CONFIGS[0]], results)
    assert lines[2].startswith("| 100 % | uniform | none cold |  |  |  |")
    assert lines[3].startswith("| 60 % | uniform | gpu | left out |  |")
    assert {line.count("|") for line in lines} == {len(HEADS) + 1}


def test_configurations_are_chosen_by_name() -> None:
    names = [config.name for config in chosen(CONFIGS, "card-8GiB, 60-uniform-auto")]
    assert names == ["60-uniform-auto", "card-8GiB"]
    assert chosen(CONFIGS, "") == list(CONFIGS)
    with pytest.raises(SystemExit, match="70-uniform is not known"):
        chosen(CONFIGS, "70-uniform")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Bench, list[list[str]]]:
    """A bench whose children only note their commands, and fail."""
    given = argparse.Namespace(
        folder=str(tmp_path), seconds=500.0, device="cuda:0", family="qwen35moe",
        size="qwen3.5-35b-a3b", quant="Q4_K_M", prompts="512,2048", tokens=128, flags="--threads 3",
    )  # fmt: skip
    seen: list[list[str]] = []

    def child(name: str, command: list[str], limit_s: float) -> Result:
        assert limit_s <= experts.LIMIT_S
        seen.append(command[3:])
        return Result(name, "failed", log=["no"])

    monkeypatch.setattr(experts, "run_child", child)
    return Bench(given, lambda text: None), seen


COMMANDS: dict[str, Callable[..., None]] = {
    "bench": bench.bench,
    "synth": synth.synth,
    "calibrate": calibrate.calibrate,
    "profile": profile.profile,
}


def test_every_flag_is_one_of_its_command(commands: tuple[Bench, list[list[str]]]) -> None:
    made, seen = commands
    for what in PREPARE_S:
        assert not made.prepare(what)
    for config in CONFIGS:
        made.run(config)
    assert {command[0] for command in seen} == set(COMMANDS)
    for command in seen:
        known = {
            "--" + name.removeprefix("as_").replace("_", "-")
            for name in inspect.signature(COMMANDS[command[0]]).parameters
        }
        assert {word for word in command if word.startswith("--")} <= known


def kinds(seen: list[list[str]]) -> list[str]:
    return [command[command.index("--only") + 1] for command in seen]


ALL, FEWER = "prompts,decode,parts", "prompts,decode"


def test_the_first_run_that_fails_is_tried_again_without_its_parts(
    commands: tuple[Bench, list[list[str]]],
) -> None:
    made, seen = commands
    assert made.run(CONFIGS[7]).status == "failed"  # which looks into no step
    assert made.run(CONFIGS[0]).status == "failed"
    assert kinds(seen) == [FEWER, ALL, FEWER]
    assert [one.name for one in made.prepared] == [CONFIGS[0].name]
    assert seen[0][seen[0].index("--routing-stats") + 1] == "off"
    made.run(CONFIGS[1])  # something else was to blame
    assert kinds(seen) == [FEWER, ALL, FEWER, ALL]


def test_parts_that_are_to_blame_for_a_failure_are_left_out_from_then_on(
    commands: tuple[Bench, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = commands

    def child(name: str, command: list[str], limit_s: float) -> Result:
        seen.append(command)
        return Result(name, "too long" if ALL in command else "done")

    monkeypatch.setattr(experts, "run_child", child)
    assert [made.run(config).status for config in CONFIGS[:2]] == ["done", "done"]
    assert kinds(seen) == [ALL, FEWER, FEWER]


def test_models_and_statistics_that_exist_are_not_made_again(
    commands: tuple[Bench, list[list[str]]],
) -> None:
    made, seen = commands
    folder = Path(made._given.folder)
    (folder / "qwen3.5-35b-a3b-skewed.gguf").write_text("a model")
    (folder / "skewed.routing.json").write_text("{}")
    (folder / "calibration").mkdir()
    assert all(made.prepare(what) for what in ("calibrate", "skewed", "profile"))
    assert seen == []
    made.run(CONFIGS[1])
    assert seen[0][seen[0].index("--routing-stats") + 1] == str(folder / "skewed.routing.json")
    made.run(CONFIGS[3])
    assert seen[-1][seen[-1].index("--routing-stats") + 1] == "off"
    assert seen[-1][1:4] == seen[0][1:4]  # the same model


def test_everything_is_written_to_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    line = ["experts.py", "--folder", str(tmp_path), "--out", str(out), "--seconds", "100"]
    monkeypatch.setattr(sys, "argv", [*line, "--only", "60-uniform-auto,60-skewed-auto"])

    def child(name: str, command: list[str], limit_s: float) -> Result:
        return Result(name, "done", 1.0, report=REPORT if name[0] == "6" else None)

    monkeypatch.setattr(experts, "run_child", child)
    monkeypatch.setattr(experts, "PREPARE_S", PREPARE_S | {"profile": 1000.0})
    experts.main()
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["prepared"]] == ["calibrate", "uniform"]
    assert [one["status"] for one in found["results"]] == ["done", "left out"]
    assert found["results"][0]["report"]["memory"]["peak_bytes"] == 12.3e9
    assert found["results"][0]["report"]["load_s"] == 7.26
    shown = capsys.readouterr().out
    assert (
        "60-uniform-auto: done in 1 s; decode 200.0 tok/s, prompts 1600 (512), 4000 (2048)" in shown
    )
    assert "| 60 % | skewed, statistics | auto | left out |" in shown
    assert "60-skewed-auto: left out\n  it takes about" in shown
