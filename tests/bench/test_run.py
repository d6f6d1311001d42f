"""A whole run on small synthesised models: what is measured, and what is left out with a reason."""

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from headroom.bench import run
from headroom.bench.figures import QUICK, BenchSettings, DecodeFigure, PartFigure, PartTimes
from headroom.bench.report import Report, report_json
from headroom.bench.run import make_fitting_plan, run_bench, with_room
from headroom.bench.traffic import Traffic
from headroom.cli.bench_tables import report_tables
from headroom.errors import FormatError, OptionError, PlanError
from headroom.experts.traces.taps import ImposedTrace, traced_layers
from headroom.experts.traces.trace import RoutingTrace, TracedLayer, save_trace
from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.kernels.native import measure
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.choice import make_run_plan
from headroom.split.launch import WEIGHT_LINES

SMALL = BenchSettings(
    prompts=(16, 40), contexts=(8, 600), batches=(1, 2), tokens=3, rounds=1, warm=1, steps=2,
    verify_rows=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)


def written(folder: Path, family: str, layers: int) -> Path:
    path = folder / f"{family}.gguf"
    write_gguf(Source(find_recipe(family, "tiny", layers), 0), path, "q8_0")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = written(tmp_path_factory.mktemp("bench"), "qwen35moe", 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "TOUCHED_BYTES", 8 << 20)
        return run_bench(path, Options(model=str(path), threads=1), SMALL)


def test_every_prompt_and_every_batch_after_every_context_has_a_figure(report: Report) -> None:
    figures = report.figures
    assert figures.left_out == []
    assert [prompt.tokens for prompt in figures.prompts] == [16, 40]
    assert [(one.context, one.batch) for one in figures.decodes] == [
        (8, 1), (8, 2), (600, 1), (600, 2),
    ]  # fmt: skip
    for one in figures.decodes:
        assert one.context < one.mean_context < one.context + 400
        assert min(one.step_s, one.pipeline_s) > 0
    assert figures.verify is not None
    assert figures.verify.rows == 4


def test_a_step_of_more_sequences_moves_more(report: Report) -> None:
    one, two = report.figures.decodes[:2]
    assert two.traffic.weights == one.traffic.weights
    assert two.traffic.state == 2 * one.traffic.state
    used, each = 4, report.figures.decodes[0].traffic.experts / 4
    assert one.traffic.experts > 0
    assert used * each <= two.traffic.experts <= 2 * used * each
    shape = find_recipe("qwen35moe", "tiny", 4).dims
    assert shape.experts_used == used


def test_parts_of_a_step_are_those_that_the_model_has(report: Report) -> None:
    parts, verify = report.figures.parts, report.figures.verify
    assert verify is not None
    names = [(part.what, part.batch, part.context) for part in parts]
    decodes = [("decode", 1, 8), ("decode", 1, 600), ("decode", 2, 8)]
    # Prompts of two sequences after 600 tokens take several steps.
    network, checked = ("network", 2, 600), ("verify", 4, verify.context)
    assert names == [*decodes, network, checked, ("prompt", 1, 40)]
    for part in parts:
        expected = {"attention", "recurrent", "experts", "head", "sampling", "other"}
        assert set(part.times.parts) == expected
        assert min(part.times.parts.values()) > 0
        assert part.times.busy_s + part.gaps_s == pytest.approx(part.step_s)
        assert part.times.steps == (1 if part.what == "prompt" else 2)


def test_the_report_is_one_json_object_with_all_figures(report: Report) -> None:
    found = json.loads(json.dumps(report_json(report)))
    assert found["version"] == 1
    assert found["model"]["file"] == "qwen35moe.gguf"
    assert found["device"]["name"] == "cpu"
    assert found["plan"]["settings"]["parallel"] == 2
    load = found["load"]
    assert load["weights_bytes"] == sum(
        found["memory"]["lines"].get(line, 0) for line in WEIGHT_LINES
    )
    assert load["weights_bytes_per_s"] == pytest.approx(load["weights_bytes"] / load["weights_s"])
    spent = [load[f"{part}_s"] for part in ("planning", "weights", "capture", "other")]
    assert sum(spent) == pytest.approx(found["load_s"])
    assert min(load["planning_s"], load["weights_s"], load["other_s"]) > 0
    assert load["capture_s"] == 0  # of a CPU
    decode = found["decodes"][0]
    assert decode["tokens_per_s"] == pytest.approx(1 / decode["step_s"])
    limit = found["bandwidth"]["bytes_per_s"] / decode["step_bytes"]["total"]
    assert decode["limit_tokens_per_s"] == pytest.approx(limit)
    assert decode["share"] == pytest.approx(decode["tokens_per_s"] / limit)
    memory = found["memory"]
    assert memory["peak_bytes"] > 0
    assert memory["planned_bytes"] == sum(memory["lines"].values())
    assert "reserve" not in memory["lines"]
    assert found["experts"]["hit_rate"] == 1.0  # of a CPU all are hot
    assert found["experts"]["layer_hit_rates"] == [1.0] * 4
    assert "gaps" in found["parts"][0]["parts"]
    assert "compare" not in found


@pytest.mark.parametrize("given", [{"device": "cpu,cpu"}, {"workers": "2"}], ids=str)
def test_stages_are_measured_and_predicted(tmp_path: Path, given: dict[str, str]) -> None:
    path = written(tmp_path, "llama", 4)
    settings = replace(SMALL, prompts=(16,), contexts=(8,), batches=(1, 2))
    report = run_bench(path, Options(model=str(path), threads=1, **given), settings)  # type: ignore[arg-type]
    predicted = report_json(report)["plan"]["predicted"]["stages"]
    for one in report_json(report)["decodes"]:
        first, last = one["stages"]
        assert [first["device"], last["device"]] == [stage["device"] for stage in predicted]
        assert min(first["busy_s"], last["busy_s"]) > 0
        assert first["handover_s"] + last["handover_s"] > 0
    console = Console(file=io.StringIO(), record=True, width=200)
    for table in report_tables(report):
        console.print(table)
    shown = console.export_text()
    assert "stages of a step" in shown
    assert f"{1e3 * predicted[0]['decode_s']:.2f} (" in shown
    left_out = ["parts: the layers run in other processes"] if "workers" in given else []
    assert report.figures.left_out == left_out


@pytest.mark.parametrize("flag", ["compare", "routing-trace"])
def test_what_needs_the_layers_in_this_process_is_refused_with_workers(flag: str) -> None:
    given = {"compares": flag == "compare", "traces": flag == "routing-trace"}
    with pytest.raises(OptionError, match=f"--{flag} measures a model in this process"):
        run.check_with_workers(Options(workers="2"), **given)
    run.check_with_workers(Options(workers="2"), compares=False, traces=False)


def test_measuring_leaves_no_statistics_behind(report: Report) -> None:
    assert [file.name for file in report.path.parent.iterdir()] == ["qwen35moe.gguf"]


def test_layers_that_one_call_runs_are_one_part(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", 2)
    options = Options(model=str(path), threads=1)
    native = describe(open_checkpoint(path)).config.layers[0].plain and measure.MODULE is not None
    report = run_bench(path, options, replace(SMALL, contexts=(8,), batches=(1,), prompts=(16,)))
    assert report_json(report)["experts"] is None
    parts = set(report.figures.parts[0].times.parts)
    layer = {"fused"} if native else {"attention", "dense"}
    assert parts == layer | {"head", "sampling", "other"}


def test_what_cannot_be_measured_is_left_out_with_a_reason(tmp_path: Path) -> None:
    path = written(tmp_path, "qwen3", 1)
    options = Options(model=str(path), threads=1, parallel=2, context=128, chunk=64)
    wanted = replace(SMALL, prompts=(16, 500), contexts=(8, 90), batches=(1, 3))
    wanted = replace(wanted, only=("prompts", "decode", "verify"))
    figures = run_bench(path, options, wanted).figures
    assert figures.left_out == [
        "prompt of 500: the context holds 128",
        "decode of 3 after 8: at most 2 sequences at a time",
        "decode of 1 after 90: it needs 161 tokens and the context holds 128",
        "decode of 3 after 90: at most 2 sequences at a time",
    ]
    assert [(one.context, one.batch) for one in figures.decodes] == [(8, 1)]
    assert figures.parts == []


def test_prompts_that_would_take_too_long_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "qwen3", 1)
    wanted = replace(SMALL, contexts=(8, 600), batches=(1,), patience_s=1e-9)
    figures = run_bench(path, Options(model=str(path), threads=1), wanted).figures
    assert [text.split(" would")[0] for text in figures.left_out] == [
        "decode of 1 after 8: its prompts", "decode of 1 after 600: its prompts",
    ]  # fmt: skip
    assert figures.left_out[0].endswith("s and may take 0 s (--patience)")
    assert figures.verify is None
    assert [part.what for part in figures.parts] == ["prompt"]


def test_patience_holds_where_no_prompt_is_measured(tmp_path: Path) -> None:
    path = written(tmp_path, "qwen3", 1)
    wanted = replace(SMALL, contexts=(8,), batches=(1,), patience_s=1e-9, only=("decode",))
    figures = run_bench(path, Options(model=str(path), threads=1), wanted).figures
    assert (figures.prompts, figures.decodes) == ([], [])
    (told,) = figures.left_out
    assert told.startswith("decode of 1 after 8: its prompts would take ")


def test_options_that_are_given_stay(tmp_path: Path) -> None:
    shape = describe(open_checkpoint(written(tmp_path, "qwen3", 1))).shape
    found = with_room(Options(), SMALL, shape)
    assert (found.parallel, found.chunk) == (2, 512)
    assert found.context == 768  # 600, and what two batches and waiting for prompts take
    assert with_room(Options(device="cuda:0"), replace(SMALL, prompts=(2048,)), shape).chunk == 2048
    assert with_room(Options(), BenchSettings(), shape).context == shape.context_limit == 4096
    given = Options(parallel=5, chunk=7, context=99)
    assert with_room(given, SMALL, shape) == given


def test_only_what_is_measured_takes_memory(tmp_path: Path) -> None:
    shape = describe(open_checkpoint(written(tmp_path, "qwen3", 1))).shape
    prompts = with_room(Options(), replace(SMALL, only=("prompts", "parts")), shape)
    assert (prompts.parallel, prompts.context) == (1, 64)  # 40 tokens, and two to look into
    decodes = replace(SMALL, prompts=(3000,), contexts=(8,), only=("decode",))
    assert with_room(Options(), decodes, shape).context < 512


def test_fewer_sequences_are_measured_where_not_all_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, tried, most = describe(open_checkpoint(written(tmp_path, "qwen3", 1))).shape, [], 3

    def plan(shape: ModelShape, options: Options, draft: ModelShape | None) -> Plan:
        tried.append(options.parallel)
        if (options.parallel or 0) > most:
            raise PlanError(f"{options.parallel} do not fit.")
        return make_run_plan(shape, options, draft=draft)

    monkeypatch.setattr(run, "make_run_plan", plan)
    wanted = replace(SMALL, batches=(1, 2, 4, 8))
    options, found = make_fitting_plan(Options(device="cpu"), wanted, shape)
    assert tried == [8, 4, 2]
    assert options.parallel == found.settings.parallel == 2
    with pytest.raises(PlanError, match="4 do not fit"):  # it is given, so nothing else is tried
        make_fitting_plan(Options(device="cpu", parallel=4), wanted, shape)
    most = 0
    with pytest.raises(PlanError, match="8 do not fit"):
        make_fitting_plan(Options(device="cpu"), wanted, shape)


def test_a_benchmark_says_where_it_is(tmp_path: Path) -> None:
    path, said = written(tmp_path, "qwen3", 1), []
    wanted = replace(
        SMALL, prompts=(8,), contexts=(8, 16), batches=(1,), only=("prompts", "decode", "verify")
    )
    options = Options(model=str(path), threads=1, device="cpu")
    run_bench(path, options, wanted, report=lambda *told: said.append(told))
    assert said[:2] == [("loading", 0, 6), ("loading, 0 %", 0, 6)]
    assert ("loading, 100 %", 0, 6) in said
    assert said[-5:] == [
        ("prompt of 8 tokens", 1, 6),
        ("answers after 8 tokens", 2, 6),
        ("answers after 16 tokens", 3, 6),
        ("a verify step", 4, 6),
        ("bandwidth", 5, 6),
    ]


def test_options_without_effect_on_a_benchmark_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = written(tmp_path, "qwen3", 1), tmp_path / "placement.json"
    wanted = replace(SMALL, contexts=(8,), batches=(1,), only=("decode",))
    options = Options(model=str(path), threads=1, swap_every="64", save_placement=str(kept))
    with caplog.at_level(logging.INFO):
        run_bench(path, options, wanted)
    told = "experts: without effect while speeds are measured: --swap-every, --save-placement"
    assert told in caplog.messages
    assert not kept.exists()


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(OptionError, match=r"--batch is 1,0\. Write whole numbers above 0"):
        replace(QUICK, batches=(1, 0))
    with pytest.raises(OptionError, match="--tokens is 0"):
        replace(QUICK, tokens=0)
    with pytest.raises(OptionError, match="--prompts is empty"):
        replace(QUICK, prompts=())
    with pytest.raises(OptionError, match=r"--only has 'speed'\. Known: prompts, decode, verify"):
        replace(QUICK, only=("decode", "speed"))
    told = r"--only parts has parts without prompts or decode, whose .* Write --only decode,parts"
    with pytest.raises(OptionError, match=told):
        replace(QUICK, only=("parts",))


def test_limits_and_gaps_are_what_is_left_of_a_step() -> None:
    figure = DecodeFigure(
        batch=4, context=8, mean_context=10.0, step_s=0.5, pipeline_s=0.4,
        traffic=Traffic(weights=60.0, experts=20.0, rows=5.0, cache=10.0, state=5.0),
    )  # fmt: skip
    assert figure.tokens_per_s == 8
    assert figure.limit(bandwidth=1000.0) == 40
    times = PartTimes(1, 0.6, {"attention": 0.1, "head": 0.3}, {})
    assert PartFigure("decode", 1, 8, 0.5, times).gaps_s == pytest.approx(0.1)
    assert PartFigure("decode", 1, 8, 0.3, times).gaps_s == 0  # kernels overlapped
    assert PartFigure("decode", 1, 8, 0.5, times).gpu_share is None  # of a CPU
    seen = replace(times, kernel_s=0.4, link_s=0.1)
    assert PartFigure("decode", 1, 8, 0.5, seen).gpu_share == pytest.approx(0.8)
    assert PartFigure("decode", 1, 8, 0.5, seen).link_share == pytest.approx(0.2)
    assert PartFigure("decode", 1, 8, 0.3, seen).gpu_share == 1.0


def test_the_device_is_the_one_that_a_run_would_choose(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, asked = describe(open_checkpoint(tiny_path)).shape, []

    def chosen(shape: object, options: Options, draft: object) -> SimpleNamespace:
        asked.append(options.device)
        return SimpleNamespace(
            devices=[SimpleNamespace(name="cuda:1"), SimpleNamespace(name="cuda:0")]
        )

    monkeypatch.setattr(run, "make_run_plan", chosen)
    found = run.with_device(Options(context=64), shape)
    assert found == Options(context=64, device="cuda:1,cuda:0")
    assert run.with_device(Options(device="cpu"), shape) == Options(device="cpu")
    assert asked == [None]


def traced(folder: Path, path: Path, tokens: int) -> Path:
    """Write a trace in which every token of every layer chooses the same experts."""
    layers = traced_layers(describe(open_checkpoint(path)).shape)
    ids = np.concatenate([np.tile(np.arange(3, 3 + x.used), (tokens, 1)) for x in layers], axis=1)
    out = folder / "same.trace"
    save_trace(out, RoutingTrace("", "all alike", layers, ids.astype(np.uint16), (0,)))
    return out


def test_an_imposed_trace_decides_what_prompts_and_answers_visit(tmp_path: Path) -> None:
    path = written(tmp_path, "qwen35moe", 4)
    trace, wanted = traced(tmp_path, path, 30), replace(SMALL, contexts=(8,))
    options = Options(model=str(path), threads=1, device="cpu")
    report = run_bench(path, options, wanted, routing_trace=trace)
    plain = run_bench(path, options, wanted)
    # Two sequences visit the same experts as one: a step reads no more of them.
    one, two = (figure.traffic.experts for figure in report.figures.decodes)
    assert one == two
    assert plain.figures.decodes[0].traffic.experts < plain.figures.decodes[1].traffic.experts
    found = report_json(report)["routing_trace"]
    assert (found["file"], found["source"], found["tokens"]) == ("same.trace", "all alike", 30)
    assert found["repeats"][1] == 1.0
    assert report_json(plain)["routing_trace"] is None
    told = "\n".join(str(x) for x in report_tables(report) if isinstance(x, str))
    assert "routing: imposed by same.trace (all alike), 30 tokens in 1 sequence; 100 %" in told


def test_what_is_measured_goes_on_in_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a cache of experts would hold what the request before it chose."""
    path, moved = written(tmp_path, "qwen35moe", 4), []
    monkeypatch.setattr(ImposedTrace, "move", lambda tap, tokens: moved.append(tokens))
    trace = traced(tmp_path, path, 30)
    wanted = replace(SMALL, prompts=(16,), contexts=(8,), only=("prompts", "decode"))
    options = Options(model=str(path), threads=1, device="cpu")
    run_bench(path, options, wanted, routing_trace=trace)
    prompts = [tokens for tokens in moved if tokens == 16]
    assert len(prompts) == 2  # the warm-up and the round
    assert moved.count(8 + SMALL.warm + SMALL.tokens) == 2  # one for each batch
    assert set(moved) == {16, 8 + SMALL.warm + SMALL.tokens, 1}  # 1: steps without the engine


def test_a_trace_that_does_not_fit_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dense = written(tmp_path, "qwen35moe", 4), written(tmp_path, "llama", 2)
    other = tmp_path / "other.trace"
    ids = np.zeros((4, 1), np.uint16)
    save_trace(other, RoutingTrace("", "", (TracedLayer(0, 4, 1),), ids, (0,)))
    monkeypatch.setattr(run, "open_engine", None)
    for model in (path, dense):
        options = Options(model=str(model), threads=1, device="cpu")
        with pytest.raises(FormatError, match="does not fit the model"):
            run_bench(model, options, SMALL, routing_trace=other)
