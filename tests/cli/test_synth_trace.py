"""`headroom synth-trace`: traces for models by file, by name and by numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from headroom.cli.main import run_command
from headroom.experts.traces.synth_trace import PRESETS
from headroom.experts.traces.trace import load_trace
from headroom.experts.traces.trace_stats import trace_stats
from tests.synth_models import MODELS, write_model

Captured = pytest.CaptureFixture[str]
FEW = ("--tokens", "40", "--sequences", "2")


def test_numbers_by_hand_make_a_trace_of_that_shape(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "a.trace"
    assert run_command(["synth-trace", "3x16x2", str(out), *FEW, "--json"]) == 0
    found, trace = json.loads(capsys.readouterr().out), load_trace(out)
    assert [(x.layer, x.experts, x.used) for x in trace.layers] == [(n, 16, 2) for n in range(3)]
    assert (trace.tokens, trace.starts, trace.model) == (40, (0, 20), "")
    assert trace.source == ("synth-trace --preset qwen3-30b-a3b --tokens 40 --sequences 2 --seed 0")
    stats = trace_stats(trace)
    assert (found["path"], found["layers"]) == (str(out), 3)
    assert found["repeats"]["8"] == stats.repeats[8]
    assert found["top_cover"] == stats.top_cover


@pytest.mark.parametrize("how", ["file", "synth", "known"])
def test_a_model_has_a_trace_of_its_layers_with_experts(
    how: str, tmp_path: Path, capsys: Captured
) -> None:
    name, dims = "synth:laguna", MODELS["laguna"].dims
    if how == "file":
        name = str(write_model("laguna", "q8_0", tmp_path))
    out = tmp_path / "a.trace"
    if how == "known":
        assert run_command(["synth-trace", "qwen3.6-35b-a3b", str(out), *FEW]) == 0
        assert "40 layers, 8 of 256 experts, 40 tokens in 2 sequences" in capsys.readouterr().out
        return
    assert run_command(["synth-trace", name, str(out), *FEW]) == 0
    found = [(x.layer, x.experts, x.used) for x in load_trace(out).layers]
    # The first layer is dense.
    assert found == [(n, dims.experts, dims.experts_used) for n in range(1, dims.layers)]


def test_a_seed_reproduces_the_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, "778", strict=True):
        line = ["synth-trace", "2x16x2", str(path), *FEW, "--seed", seed, "--preset", "skewed"]
        assert run_command(line) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert not np.array_equal(load_trace(paths[0]).ids, load_trace(paths[2]).ids)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["2x16x2", "--preset", "qwen"], f"--preset is 'qwen'. Presets: {', '.join(PRESETS)}."),
        (["2x4x5"], "2x4x5 is 2 layers with 5 of 4 experts. "),
        (["0x4x2"], "0x4x2 is 0 layers with 2 of 4 experts. "),
        (["synth:llama"], "synth:llama has no routed experts. "),
        (["2x16x2", "--tokens", "4", "--sequences", "5"], "--sequences is 5 and --tokens only 4."),
        (["99x256x8", "--tokens", "9999999"], "9999999 tokens take 14.75 GiB, and a trace may"),
        (["nowhere"], "There is no file, folder or known model 'nowhere'."),
    ],
)
def test_what_cannot_be_made_is_refused(
    line: list[str], told: str, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "a.trace"
    assert run_command(["synth-trace", line[0], str(out), *line[1:]]) != 0
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert not out.exists()


def test_only_a_trace_is_written_over(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "a.trace"
    for _ in range(2):
        assert run_command(["synth-trace", "2x16x2", str(out), *FEW]) == 0
    out.write_text("notes")
    assert run_command(["synth-trace", "2x16x2", str(out), *FEW]) == 2
    assert out.read_text() == "notes"
    assert "is not a routing trace file" in capsys.readouterr().err
    assert run_command(["synth-trace", "2x16x2", str(tmp_path / "no" / "a"), *FEW]) == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err
