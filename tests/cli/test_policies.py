"""`headroom experts --policies`: a trace through every policy, as JSON and as a table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headroom.cli.main import run_command
from headroom.experts.cache import POLICIES
from headroom.experts.traces.replay import ReplaySettings, replay, replay_halves
from headroom.experts.traces.trace import RoutingTrace, load_trace, save_trace
from headroom.experts.traces.trace_stats import trace_stats
from tests.synth_models import MODELS, write_model

DIMS = MODELS["laguna"].dims
LAYERS = DIMS.layers - 1  # the first layer is dense
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("laguna", "q8_0", tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def trace(path: Path) -> Path:
    out = path.with_name("laguna.trace")
    line = ["synth-trace", str(path), str(out), "--tokens", "120", "--sequences", "4"]
    assert run_command(line) == 0
    return out


def line_of(path: Path, trace: Path, *rest: str) -> list[str]:
    line = ["experts", str(path), "--routing-stats", "off", "--policies", "--trace", str(trace)]
    return [*line, *rest]


def shown(capsys: Captured, line: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run_command([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def check(found: dict[str, Any], policy: str, slots: list[int]) -> None:
    assert (found["policy"], found["slots"]) == (policy, slots)
    assert len(found["layer_hit_rates"]) == LAYERS


def test_given_slots_are_replayed_half_by_half(path: Path, trace: Path, capsys: Captured) -> None:
    half = DIMS.experts // 2
    rest = ("--device", "cpu", "--slots", f"50%,{half + 1}", "--sequences", "1,3")
    found = shown(capsys, line_of(path, trace, *rest, "--link", "0,1,1"))
    loaded = load_trace(trace)
    cases = [
        (slots, sequences, link, policy)
        for slots in (half, half + 1)
        for sequences in (1, 3)
        for link in (None, (0, 1, 1))
        for policy in POLICIES
    ]
    assert len(found["replays"]) == len(cases)
    for one, (slots, sequences, link, policy) in zip(found["replays"], cases, strict=True):
        check(one, policy, [slots] * LAYERS)
        assert (one["sequences"], one["link"]) == (sequences, link and list(link))
        settings = ReplaySettings(policy, sequences, link)
        expected = replay_halves(loaded, [slots] * LAYERS, settings)
        assert one["hit_rate"] == expected.hit_rate
        assert one["misses_per_layer_step"] == expected.misses
        # On a CPU experts keep the size that they have in the file: 34 bytes for 32 values.
        size = 3 * DIMS.hidden * DIMS.expert_ffn * 34 // 32
        assert one["bytes_per_token"] == expected.bytes_per_token([size] * LAYERS)
    assert found["trace"]["file"] == "laguna.trace"
    assert found["trace"]["median_distance"] == trace_stats(loaded).median_distance


def test_without_slots_caches_begin_as_the_plan_places_experts(
    path: Path, trace: Path, capsys: Captured
) -> None:
    rest = ("--device", "2GiB", "--expert-budget", "50%")
    found = shown(capsys, line_of(path, trace, *rest))
    assert run_command(["experts", str(path), "--routing-stats", "off", *rest, "--json"]) == 0
    placed = [x["hot"] for x in json.loads(capsys.readouterr().out)["layers"]]
    for one, policy in zip(found["replays"], POLICIES, strict=True):
        check(one, policy, [DIMS.experts // 2] * LAYERS)
        expected = replay(load_trace(trace), placed, ReplaySettings(policy))
        assert one["hit_rate"] == expected.hit_rate
        assert one["allowed"] == (policy == "static" or DIMS.experts // 2 >= 4 * DIMS.experts_used)


def test_the_plans_own_table_divides_misses_between_link_and_cpu(
    path: Path, trace: Path, capsys: Captured
) -> None:
    rest = ("--device", "2GiB", "--expert-budget", "50%", "--link", "auto", "--sequences", "2")
    alone, divided = [shown(capsys, line_of(path, trace, *rest))["replays"][at] for at in (0, 4)]
    assert alone["link"] is None
    assert alone["bytes_per_token"]["cpu"] == 0
    assert len(divided["link"]) == 2 * DIMS.experts_used + 1
    # As in the engine: the first miss crosses the link, or a cache would never be filled.
    assert divided["link"][:2] == [0, 1]
    # Nothing changes which experts a static set misses, only who reads them; the CPU reads one for
    # both rows, where the GPU would read it twice.
    assert divided["misses_per_layer_step"] == alone["misses_per_layer_step"]
    assert alone["linked_per_layer_step"] == alone["misses_per_layer_step"]
    read = sum(divided["bytes_per_token"].values())
    assert 0.9 * alone["bytes_per_token"]["link"] < read <= alone["bytes_per_token"]["link"]


def test_the_table_has_a_line_for_every_policy(path: Path, trace: Path, capsys: Captured) -> None:
    rest = ("--device", "cpu", "--slots", "50%", "--link", "0,1", "--sequences", "1,2")
    assert run_command(line_of(path, trace, *rest)) == 0
    told = capsys.readouterr().out
    for policy in POLICIES:
        assert told.count(f" {policy}") >= 4
    assert "of a token's experts were chosen by the token before" in told.replace("\n", " ")


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ((), "All experts fit on cpu, so that none is missed."),
        (("--slots", "101%"), "--slots has '101%', and layers have"),
        (("--slots", "many"), "--slots has 'many', and layers have"),
        (("--slots", "50%", "--sequences", "0"), "--sequences is '0'."),
        (("--slots", "50%", "--sequences", "61"), "--sequences has 61, and half of the trace"),
        (("--slots", "50%", "--link", "0,2"), "--link is 0,2: entry n may be at most n."),
        (("--slots", "50%", "--link", "auto"), "--link auto needs cold experts"),
        (("--slots", "50%", "--svg", "x.svg"), "--svg draws the hot experts"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    rest: tuple[str, ...], told: str, path: Path, trace: Path, capsys: Captured
) -> None:
    assert run_command(line_of(path, trace, "--device", "cpu", *rest)) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_a_trace_of_another_model_is_refused(path: Path, tmp_path: Path, capsys: Captured) -> None:
    other = tmp_path / "other.trace"
    assert run_command(["synth-trace", "3x16x2", str(other), "--tokens", "8"]) == 0
    assert run_command(line_of(path, other, "--device", "cpu", "--slots", "50%")) == 1
    assert f"{other} does not fit the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--policies"], "--policies replays a routing trace, and none is named."),
        (["--slots", "5"], "--slots says nothing without --policies."),
        (["--trace", "x"], "--trace says nothing without --policies."),
    ],
)
def test_flags_that_say_nothing_are_refused(
    line: list[str], told: str, path: Path, capsys: Captured
) -> None:
    assert run_command(["experts", str(path), *line]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_a_trace_that_repeats_nothing_has_no_median(
    path: Path, trace: Path, tmp_path: Path, capsys: Captured
) -> None:
    ids = np.tile(np.arange(DIMS.experts_used, dtype=np.uint16), (4, LAYERS))
    layers = load_trace(trace).layers
    once = tmp_path / "once.trace"  # one token a sequence
    save_trace(once, RoutingTrace("", "", layers, ids, (0, 1, 2, 3)))
    found = shown(capsys, line_of(path, once, "--device", "cpu", "--slots", "50%"))
    assert found["trace"]["median_distance"] is None
