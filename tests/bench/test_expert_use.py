"""What cold experts cost while a figure was measured, from totals before and after."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from headroom import llm
from headroom.bench import run
from headroom.bench.expert_use import (
    ExpertLocations,
    ExpertReport,
    TelemetryReading,
    find_locations,
    use_between,
)
from headroom.bench.figures import BenchSettings
from headroom.bench.report import Report, report_json
from headroom.bench.run import run_bench
from headroom.cli.bench_tables import report_tables
from headroom.experts.placement import LayerExperts
from headroom.experts.telemetry import ColdFigures, ColdReading, ExpertTelemetry
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.kernels.native import measure
from headroom.llm import OpenedModel
from headroom.options import Options
from headroom.split.pipeline import Pipeline
from headroom.split.stage import CpuStage
from tests.experts.stores import NotedExchanges, blob_layout, small_store
from tests.stand_in.gpu import stand_in_driver

WHERE = ExpertLocations(
    experts=(0, 8, 8, 8), hot=(0, 8, 6, 2), expert_bytes=(0, 10, 10, 20),
    paths=("", "", "gpu", "cpu"), source="even", pinned=True,
)  # fmt: skip
BEFORE = TelemetryReading(
    1.0, 1.5, ExpertTelemetry((0, 4, 4, 4), (0, 4, 3, 1), 2, {"gpu": 5, "cpu": 60}, {"wait": 0.5})
)
AFTER = TelemetryReading(
    3.5, 9.0,
    ExpertTelemetry(
        (0, 24, 24, 24), (0, 24, 19, 5), 12, {"gpu": 25, "cpu": 360, "stream": 0}, {"wait": 0.75}
    ),
)  # fmt: skip


def test_locations_count_what_is_cold() -> None:
    assert WHERE.cold == 2 + 6
    assert WHERE.cold_bytes == 2 * 10 + 6 * 20
    assert WHERE.layers_by_path == {"cpu": 1, "gpu": 1}


def test_figures_are_of_what_happened_between_two_readings() -> None:
    use = use_between(BEFORE, AFTER)
    assert use.seconds == 2.0  # readings themselves are not in
    assert use.tokens == 10
    assert use.read_bytes == {"gpu": 20, "cpu": 300}
    found = use.summary()
    assert found["hit_rate"] == pytest.approx((20 + 16 + 4) / 60)
    assert found["cold_picks_per_token"] == 2.0
    assert found["cold_bytes_per_token"] == {"gpu": 2.0, "cpu": 30.0}
    assert found["cold_bytes_per_s"] == {"gpu": 10.0, "cpu": 150.0}
    assert found["ms_per_token"] == {"wait": 25.0}
    assert use_between(BEFORE, AFTER, 0.5).summary()["cold_bytes_per_s"] == {
        "gpu": 40.0, "cpu": 600.0,
    }  # fmt: skip


def test_shares_are_of_what_each_path_was_measured_to_reach() -> None:
    report = ExpertReport(WHERE, AFTER.totals, {"gpu": 20.0, "cpu": 0.0, "stream": 50.0})
    use = use_between(BEFORE, AFTER)
    assert report.shares(use) == {"gpu": 0.5}  # what was not measured has no share
    assert report.use_json(None) is None
    found = json.loads(json.dumps(report.as_json()))
    assert (found["hot"], found["cold"], found["paths"]) == (16, 8, ["", "", "gpu", "cpu"])


def test_a_model_without_experts_has_no_locations() -> None:
    dense = SimpleNamespace(layers=[SimpleNamespace(experts=0)])
    assert find_locations(SimpleNamespace(shape=dense)) is None  # type: ignore[arg-type]


class Meter:
    """A worker that reports the reads that a test sets."""

    def __init__(self) -> None:
        self.asked = 0

    def read(self) -> ColdReading:
        self.asked += 1
        figures = ColdFigures(
            {"gpu": 10 * self.asked, "cpu": 1000 * self.asked, "stream": 500 * self.asked},
            {"hot": 0.25 * self.asked},
        )
        return ColdReading(figures)


HOT = 5  # experts of each layer


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A run on the CPU whose experts are said to be partly cold."""
    path = tmp_path_factory.mktemp("bench") / "moe.gguf"
    write_gguf(Source(find_recipe("qwen3moe", "tiny", 2), 0), path, "q8_0")
    settings = BenchSettings(
        prompts=(16,), contexts=(8,), batches=(2,), tokens=6, rounds=2, warm=1,
        only=("prompts", "decode"),
    )  # fmt: skip
    count = find_recipe("qwen3moe", "tiny", 2).dims.experts
    # The GPU reads the small experts of the first layer in place; the CPU computes the large ones.
    layouts = [blob_layout(count), blob_layout(count, (400_000, 400_000, 200_000))]
    start = llm.start_pipeline

    def started(*given: object, **named: object) -> Pipeline:
        pipeline = start(*given, **named)  # type: ignore[arg-type]
        experts = NotedExchanges(store, [LayerExperts(count, 1)] * 2)
        pipeline.experts, pipeline.meter = experts, Meter()
        return pipeline

    def bandwidths(opened: OpenedModel) -> dict[str, float]:
        return {"gpu": 5e10, "stream": 5.5e10, "cpu": 1e11}

    with pytest.MonkeyPatch.context() as patch, stand_in_driver(patch):
        store = small_store(
            list(layouts), [tuple(range(HOT))] * 2, cold="auto", pin=True, staging_bytes=2 << 20
        )
        patch.setattr(measure, "TOUCHED_BYTES", 8 << 20)
        patch.setattr(llm, "start_pipeline", started)
        patch.setattr(run, "cold_bandwidths", bandwidths)
        patch.setattr(CpuStage, "store", property(lambda self: store))
        return run_bench(path, Options(model=str(path), threads=1, device="cpu"), settings)


def test_only_what_was_asked_for_is_measured(report: Report) -> None:
    assert report.figures.verify is None
    assert report.figures.parts == []
    assert len(report.figures.prompts) == len(report.figures.decodes) == 1


def test_hits_of_a_decode_figure_are_those_of_its_own_steps(report: Report) -> None:
    use = report.figures.decodes[0].experts
    assert use is not None
    # Two rows per step: measured steps, one warm-up step, and some until the second reading.
    assert 2 * 7 <= use.change.tokens <= 2 * 7 + 40
    cold = use.change.picks[0] - use.change.hits[0]
    assert 0 < cold < use.change.picks[0]
    assert use.read_bytes == {"gpu": 10, "cpu": 1000, "stream": 500}
    assert report.experts is not None
    assert report.experts.totals.tokens > use.change.tokens


def test_a_prompt_figure_has_the_rows_of_its_rounds(report: Report) -> None:
    use = report.figures.prompts[0].experts
    assert use is not None
    assert use.change.tokens == 2 * 16
    assert use.read_bytes["stream"] >= 500


def test_the_report_says_where_experts_are_and_what_cold_ones_cost(report: Report) -> None:
    found = json.loads(json.dumps(report_json(report)))
    experts = found["experts"]
    assert experts["hot_by_layer"] == [HOT, HOT]
    assert experts["layers_by_path"] == {"cpu": 1, "gpu": 1}
    assert experts["bandwidths"]["stream"] == 5.5e10
    decode = found["decodes"][0]["experts"]
    assert 0 < decode["hit_rate"] < 1
    assert set(decode["bandwidth_share"]) == {"gpu", "cpu", "stream"}
    console = Console(width=200)
    with console.capture() as shown:
        for table in report_tables(report):
            console.print(table)
    text = " ".join(shown.get().split())
    for words in (
        f"experts: {2 * HOT} hot,", "placement: drawn, cold: cpu in 1 layer, gpu in 1 layer;",
        "cold experts", "gpu MB a token, GB/s of 50", "hot ", "batch 2 after 8", "GPU busy",
    ):  # fmt: skip
        assert words in text


def test_a_report_without_cold_experts_has_one_line_for_experts(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    write_gguf(Source(find_recipe("qwen3moe", "tiny", 1), 0), path, "q8_0")
    settings = BenchSettings(
        prompts=(8,), contexts=(8,), batches=(1,), tokens=2, rounds=1, only=("decode",)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "TOUCHED_BYTES", 8 << 20)
        report = run_bench(path, Options(model=str(path), threads=1, device="cpu"), settings)
    assert report.experts is not None
    total = report.experts.locations.experts[0]
    texts = [text for text in report_tables(report) if isinstance(text, str)]
    line = next(text for text in texts if text.startswith("experts"))
    assert line == f"experts: {total} hot, 0 cold; 100.0 % of all choices hot"
    assert not any(getattr(x, "title", "") == "cold experts" for x in report_tables(report))
    assert report_json(report)["decodes"][0]["experts"]["hit_rate"] == 1.0
