"""The time to the first token of prompts that begin like earlier ones."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headroom.bench.figures import BenchSettings, FirstToken, PrefixFigure
from headroom.bench.prefix import new_key
from headroom.bench.report import Report, report_json
from headroom.bench.run import count_steps, run_bench, with_room
from headroom.cli.bench_tables import report_tables
from headroom.families.files import open_checkpoint
from headroom.kernels.native import measure
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.progress import ignore_steps
from tests.synth_models import write_model

SMALL = BenchSettings(prompts=(130, 200), rounds=2, only=("prefix",))


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)


def measured(path: Path, settings: BenchSettings = SMALL, **options: object) -> Report:
    given = Options(model=str(path), threads=1, **options)  # type: ignore[arg-type]
    return run_bench(path, given, settings, report=ignore_steps)


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), record=True, width=200)
    for table in report_tables(report):
        console.print(table)
    return console.export_text()


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_a_prompt_is_measured_cold_and_after_others_that_begin_alike(
    tmp_path: Path, family: str
) -> None:
    path = write_model(family, "q8_0", tmp_path, few_layers=True)
    report = measured(path, chunk=64)
    assert report.figures.left_out == []
    for tokens, figure in zip(SMALL.prompts, report.figures.prefixes, strict=True):
        assert (figure.cold.prompt, figure.cold.cached) == (tokens, 0)  # in every round
        assert figure.same.prompt == tokens
        assert tokens // 64 * 64 <= figure.same.cached <= tokens
        assert figure.longer.prompt == tokens + 64
        assert tokens // 64 * 64 <= figure.longer.cached <= tokens
        assert (figure.branch.prompt, figure.branch.cached) == (tokens, 64)
        for one in (figure.cold, *figure.warm.values()):
            assert one.seconds > 0
            assert one.computed == one.prompt - one.cached
    found = json.loads(json.dumps(report_json(report)))["prefix"]
    assert [one["tokens"] for one in found] == list(SMALL.prompts)
    assert found[1]["cold"]["cached_tokens"] == 0
    assert found[1]["same"]["ratio"] == pytest.approx(
        found[1]["cold"]["first_token_s"] / found[1]["same"]["first_token_s"]
    )
    assert "time to the first token" in shown(report)


def test_a_figure_names_its_warm_prompts() -> None:
    one = FirstToken(200, 192, 0.01)
    figure = PrefixFigure(cold=FirstToken(200, 0, 0.2), same=one, longer=one, branch=one)
    assert list(figure.warm) == ["same", "longer", "branch"]
    assert one.computed == 8


def test_what_cannot_be_measured_is_left_out(tmp_path: Path) -> None:
    path = write_model("qwen3", "q8_0", tmp_path, few_layers=True)
    settings = replace(SMALL, prompts=(40, 130), rounds=1)
    report = measured(path, settings, context=192)
    assert [one.cold.prompt for one in report.figures.prefixes] == [40]
    assert report.figures.left_out == ["prefix of 130: the context holds 192"]
    report = measured(path, replace(settings, prompts=(40,)), no_prefix_cache=True)
    assert report.figures.prefixes == []
    assert report.figures.left_out == ["prefix of 40: --no-prefix-cache turns the cache off"]


def test_a_key_is_that_of_no_other_run() -> None:
    assert new_key() != new_key()


def test_there_is_room_for_longer_prompts_and_steps_are_those_of_a_server(tmp_path: Path) -> None:
    shape = describe(open_checkpoint(write_model("qwen3", "q8_0", tmp_path))).shape
    settings = BenchSettings(prompts=(1000,), only=("prefix",))
    found = with_room(Options(device="cuda:0"), settings, shape)
    assert found.context is not None
    assert found.context > 1064
    assert (found.chunk, found.parallel) == (512, 1)
    whole = replace(settings, only=("prompts",))
    assert with_room(Options(device="cuda:0"), whole, shape).chunk == 1000
    assert with_room(Options(device="cuda:0", chunk=128), settings, shape).chunk == 128
    assert count_steps(SMALL, peer=False) == 2 + len(SMALL.prompts)
    assert count_steps(replace(SMALL, only=("agent",)), peer=False) == 2 + 2
