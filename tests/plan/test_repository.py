"""All models of a repository are compared by their headers, before any is fetched."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from headroom.cli.main import run_command
from headroom.errors import FormatError
from headroom.plan.repository import MOST_QUANTS, OfferedFile, offered_files, plan_offered
from headroom.plan.sources import find_shape
from tests.formats.local_hub import LocalHub, local_hub
from tests.synth_models import write_model

MIXES = {"m-Q8_0.gguf": "q8_0", "m-Q4_0.gguf": "q4_0", "m-F16.gguf": "f16"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that differ in their types alone, by the names that a hub has for them."""
    folder = tmp_path_factory.mktemp("offered")
    return {
        name: write_model("qwen3moe", mix, folder / mix, few_layers=True)
        for name, mix in MIXES.items()
    }


@pytest.fixture
def hub(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    offered = {name: path.read_bytes() for name, path in files.items()}
    more = {"README.md": b"#", "mmproj-F16.gguf": b"GGUF", "m-Q2_K.gguf": b"GGUF but broken"}
    with local_hub(LocalHub("org/repo", offered | more)) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE",
            served.url + "/{repo_id}/resolve/{revision}/{filename}",
        )  # fmt: skip
        yield served


def plan(*flags: str) -> int:
    return run_command(["plan", *flags, "--context", "512", "--parallel", "1"])


def test_every_model_is_planned_as_by_itself(
    hub: LocalHub, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device", "rtx3060-12gb", "--home", str(tmp_path)]
    assert plan("hf.co/org/repo", *flags, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["repository"] == "org/repo"
    rows = {row["file"]: row for row in report["models"]}
    assert [*rows] == ["m-Q2_K.gguf", "m-Q4_0.gguf", "m-Q8_0.gguf", "m-F16.gguf"]  # by size
    assert rows["m-Q2_K.gguf"]["plan"] is None
    assert "m-Q2_K.gguf" in rows["m-Q2_K.gguf"]["error"]
    for name, path in files.items():
        assert plan(str(path), *flags, "--json") == 0
        alone = json.loads(capsys.readouterr().out)
        assert rows[name]["plan"]["devices"] == alone["devices"]
        assert rows[name]["size_bytes"] == path.stat().st_size
        # The header travels, and the weights do not.
        assert hub.sent[name] <= max(1 << 20, path.stat().st_size)


def test_people_get_a_row_for_each_and_what_to_fetch(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "all.svg"
    assert plan("org/repo", "--device", "24GiB", "--home", str(tmp_path), "--svg", str(svg)) == 0
    shown = capsys.readouterr().out
    table = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert all(" yes " in table[quant] for quant in ("Q4_0", "Q8_0", "F16"))
    assert "cannot run" in table["Q2_K"]
    assert "headroom pull org/repo:F16 fetches the largest that fits" in shown
    assert "4 of" not in svg.read_text()
    assert "3 of 3 fit" in svg.read_text()


def test_one_that_fits_nowhere_is_told_with_3(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--device", "16MiB", "--ram", "16MiB", "--home", str(tmp_path)]
    assert plan("org/repo", *small) == 3
    captured = capsys.readouterr()
    assert " no " in captured.out
    assert "None of the 4 models of org/repo fits" in captured.err


@pytest.mark.parametrize("flag", [["--explain", "kv"], ["--emit", "llama.cpp"]])
def test_what_needs_one_model_asks_for_its_name(
    flag: list[str], hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("org/repo", "--device", "24GiB", "--home", str(tmp_path), *flag) == 2
    assert "offers 4 models, and this needs one. Name one, as in org/repo:F16" in (
        " ".join(capsys.readouterr().err.split())
    )


def test_a_quantisation_and_a_repository_of_safetensors_are_single_models(
    hub: LocalHub, tmp_path: Path
) -> None:
    assert offered_files("org/repo:Q8_0", tmp_path) == []
    assert offered_files("model.gguf", tmp_path) == []
    assert find_shape("org/repo:Q8_0", tmp_path).name == "m-Q8_0"
    hub.files["model.safetensors"] = b"1"
    assert offered_files("org/repo", tmp_path) == []


def test_files_of_one_quantisation_are_told_apart_by_their_names(
    hub: LocalHub, tmp_path: Path
) -> None:
    hub.files = {"a-Q8_0.gguf": b"1", "b-Q8_0.gguf": b"22", "c-Q4_0-00001-of-00002.gguf": b"333",
                 "c-Q4_0-00002-of-00002.gguf": b"4444"}  # fmt: skip
    found = offered_files("org/repo", tmp_path)
    assert [(x.name, x.size_bytes) for x in found] == [
        ("org/repo:a-Q8_0.gguf", 1), ("org/repo:b-Q8_0.gguf", 2), ("org/repo:Q4_0", 7),
    ]  # fmt: skip


def test_a_repository_of_too_many_models_is_refused_before_any_is_read() -> None:
    files = [
        OfferedFile(f"o/r:{at}.gguf", str(at), f"{at}.gguf", at) for at in range(MOST_QUANTS + 1)
    ]
    with pytest.raises(FormatError, match="o/r offers 41 models; at most 40 are compared"):
        plan_offered("o/r", files, lambda shape: pytest.fail("nothing is planned"))
