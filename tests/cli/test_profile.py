"""`headroom profile`: prompts in, statistics out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.experts.traces.trace import load_trace
from headroom.families.synth.recipe import Recipe, find_recipe
from headroom.families.synth.routing import hot_experts, make_skew
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf

SHARE, HOT = 0.9, 0.6  # of the choices go to so many experts
SEED = 2
FEW = ("--threads", "1", "--context", "256", "--chunk", "64", "--parallel", "2")


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe]:
    recipe = find_recipe("laguna", "tiny", 4)
    path = tmp_path_factory.mktemp("skewed") / "m.gguf"
    write_gguf(Source(recipe, SEED, make_skew(recipe, SHARE, HOT)), path, "q8_0")
    return path, recipe


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("What is a mixture of experts, and who mixes it?\nTell me about the sea.\n")
    return path


def profiled(capsys: pytest.CaptureFixture[str], *line: object) -> dict[str, Any]:
    assert run_command(["profile", *map(str, line), *FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_skew_of_a_skewed_model_is_found(
    skewed: tuple[Path, Recipe], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, recipe = skewed
    found = profiled(capsys, path, "--prompts", prompts, "--tokens", 60)
    kept = path.with_name("m.gguf.routing.json")
    assert (found["path"], found["prompts"]) == (str(kept), 2)
    table = json.loads(kept.read_text())
    assert table["counts"][0] == []  # a dense layer
    hot = round(HOT * recipe.dims.experts)
    for number, layer in enumerate(found["layers"], start=1):
        row = table["counts"][number]
        popular = hot_experts(SEED, number, recipe.dims.experts, hot)
        share = sum(row[expert] for expert in popular) / sum(row)
        assert share == pytest.approx(SHARE, abs=0.08)
        assert layer["top"]["60"] >= share
        assert layer["top"]["10"] < layer["top"]["30"] < layer["top"]["60"]
    rows = found["tokens"] - 2  # the last token of an answer is not read again
    assert found["choices"] == rows * recipe.dims.experts_used * len(found["layers"])


def test_a_profile_is_written_anew_where_told_and_as_a_table(
    skewed: tuple[Path, Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = skewed
    asked, out = tmp_path / "p.jsonl", tmp_path / "mine.json"
    asked.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "you"}\n')
    totals = []
    for _ in range(2):
        found = profiled(capsys, path, "--prompts", asked, "--tokens", 3, "--out", out)
        totals.append((found["choices"], json.loads(out.read_text())["counts"]))
    assert sum(map(sum, totals[0][1])) == totals[0][0]
    assert totals[1][0] == totals[0][0]
    line = ["profile", str(path), "--prompts", str(asked), "--out", str(out), "--tokens", "2"]
    asked.write_text("only text\n")
    assert run_command([*line, "--raw", *FEW]) == 0
    shown = capsys.readouterr().out
    assert "top 10 % take" in shown
    assert f"kept in {out}" in shown.replace("\n", "")


def test_statistics_that_are_off_are_not_written_over(
    skewed: tuple[Path, Recipe],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("headroom.llm.LLM.__init__")
    kept = skewed[0].with_name("m.gguf.routing.json")
    before = kept.read_text() if kept.exists() else None
    line = ["profile", str(skewed[0]), "--prompts", str(prompts), *FEW]
    assert run_command([*line, "--routing-stats", "off"]) == 2
    assert capsys.readouterr().err == (
        "error: --routing-stats off keeps no statistics, and a profile is nothing else. Leave it "
        "out, or name a file with --out.\n"
    )
    assert (kept.read_text() if kept.exists() else None) == before


@pytest.mark.parametrize("flag", ["--out", "--routing-stats"])
def test_a_file_in_a_folder_that_is_not_there_is_refused(
    flag: str,
    skewed: tuple[Path, Recipe],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("headroom.llm.LLM.__init__")
    lost = prompts.parent / "nowhere" / "x.json"
    line = ["profile", str(skewed[0]), "--prompts", str(prompts), flag, str(lost)]
    assert run_command([*line, *FEW]) == 2
    assert capsys.readouterr().err == (
        f"error: {flag} {lost} is in a folder that does not exist. Make the folder, or name "
        "another file.\n"
    )
    assert not lost.parent.exists()


def test_a_dense_model_is_refused_before_it_is_loaded(
    tiny_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["profile", str(tiny_path), "--prompts", str(prompts)]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"error: {tiny_path} has no routed experts. Dense models need no statistics.\n"
    )


def test_worker_processes_count_no_choices_and_are_refused(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADROOM_WORKERS", "2")
    trace = prompts.with_name("trace")
    line = ["profile", "m.gguf", "--prompts", str(prompts), "--trace", str(trace)]
    assert run_command(line) == 2
    assert "Leave out HEADROOM_WORKERS" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_refused_with_its_line(
    skewed: tuple[Path, Recipe], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text("short\n" + "long " * 400 + "\n")
    assert run_command(["profile", str(skewed[0]), "--prompts", str(prompts), *FEW]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: The prompt of line 2 has ")
    assert "and the context holds 256." in error


def test_a_file_that_cannot_be_written_is_reported_before_the_model_is_loaded(
    skewed: tuple[Path, Recipe],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = prompts / "below-a-file.json"
    monkeypatch.delattr("headroom.llm.LLM.__init__")
    line = ["profile", str(skewed[0]), "--prompts", str(prompts), "--tokens", "1"]
    assert run_command([*line, "--out", str(out), *FEW]) == 2
    assert capsys.readouterr().err == (f"error: {out} cannot be written. Name a file with --out.\n")


@pytest.mark.parametrize("flag", ["--out", "--routing-stats", "--save-placement"])
def test_a_model_is_never_written_over(
    flag: str,
    skewed: tuple[Path, Recipe],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("headroom.split.launch.load_model", None)  # before anything is loaded
    path = skewed[0]
    other = prompts.with_name("other.gguf")
    other.write_bytes(path.read_bytes()[: 1 << 16])
    for target in (path, other):
        before = target.read_bytes()
        line = ["profile", str(path), "--prompts", str(prompts), flag, str(target), *FEW]
        assert run_command(line) in (1, 2)
        error = capsys.readouterr().err
        assert f"{target} is " in error
        assert "Delete" not in error
        assert target.read_bytes() == before


@pytest.mark.parametrize("content", ['{"version": 1, "model": "other", "counts": [', "notes"])
@pytest.mark.parametrize("flag", ["--out", "--routing-stats", None])
def test_a_file_that_is_no_statistics_is_not_written_over(
    flag: str | None,
    content: str,
    skewed: tuple[Path, Recipe],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("headroom.llm.LLM.__init__")
    model = prompts.with_name("m.gguf")
    model.symlink_to(skewed[0])
    target = prompts.with_name("n.json") if flag else prompts.with_name("m.gguf.routing.json")
    target.write_text(content)
    line = ["profile", str(model), "--prompts", str(prompts), *FEW]
    assert run_command([*line, *([flag, str(target)] if flag else [])]) in (1, 2)
    told = capsys.readouterr().err
    assert f"error: {target} is " in told
    mends = f"Delete {target}, or name another file with --out.\n"
    assert told.endswith(mends) == (flag is None)
    assert target.read_text() == content


def test_statistics_of_another_model_are_written_over_only_where_out_names_them(
    skewed: tuple[Path, Recipe], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = prompts.with_name("n.json")
    content = '{"version": 1, "model": "other", "saved_at": 0, "counts": []}'
    target.write_text(content)
    line = [skewed[0], "--prompts", prompts, "--tokens", 1]
    asked = ["profile", *map(str, line), *FEW, "--routing-stats", str(target)]
    assert run_command(asked) == 1
    assert f"{target} is of another model (other, not " in capsys.readouterr().err
    assert target.read_text() == content
    profiled(capsys, *line, "--out", target)
    assert json.loads(target.read_text())["model"] != "other"


def test_a_trace_of_every_token_is_recorded_beside_the_statistics(
    skewed: tuple[Path, Recipe], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, kept = skewed[0], prompts.parent / "x.trace", prompts.parent / "s.json"
    line = ("--prompts", prompts, "--tokens", 9, "--out", kept, "--trace", out)
    found = profiled(capsys, path, *line)
    assert found["trace"] == str(out)
    trace = load_trace(out)
    table = json.loads(kept.read_text())
    assert trace.model == table["model"]
    assert trace.source == f"2 prompts through {found['model']}"
    assert len(trace.sequences()) == 2
    assert trace.tokens == found["tokens"] - 2
    for index, layer in enumerate(trace.layers):
        counts = Counter(trace.of_layer(index).flatten().tolist())
        assert table["counts"][layer.layer] == [counts[x] for x in range(layer.experts)]
    assert profiled(capsys, path, *line)["tokens"] == found["tokens"]  # replaces a trace
    shown = ["profile", *map(str, (path, *line)), *FEW]
    assert run_command(shown) == 0
    assert f"trace written to {out}" in capsys.readouterr().out.replace("\n", "")


def test_a_trace_replaces_no_other_file(
    skewed: tuple[Path, Recipe],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr("headroom.llm.LLM.__init__")
    line = ["profile", str(skewed[0]), "--prompts", str(prompts), *FEW, "--trace"]
    for other, why in (
        (prompts, "is there and is not a routing trace file"),
        (skewed[0], "is a file of the model"),
    ):
        before = other.read_bytes()
        assert run_command([*line, str(other)]) == 2
        assert capsys.readouterr().err == (
            f"error: {other} {why}; it is not written over. Name another file with --trace.\n"
        )
        assert other.read_bytes() == before
    assert run_command([*line, str(prompts.parent / "nowhere" / "x")]) == 2
    assert "--trace" in capsys.readouterr().err
