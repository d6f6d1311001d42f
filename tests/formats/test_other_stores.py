"""Models of other programs are found where they lie, and belong to these programs."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from headroom.cli.main import run_command
from headroom.errors import FormatError
from headroom.formats import other_stores
from headroom.formats.hub import find_model
from headroom.formats.other_stores import find_ollama, ollama_models, owner_of
from headroom.formats.pulled import other_models
from tests.synth_models import write_model

WEIGHTS = "application/vnd.ollama.image.model"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the models of three other programs."""
    home = tmp_path / "user"
    monkeypatch.setattr(other_stores, "user_home", lambda: home)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf/hub"))
    model = write_model("llama", "q8_0", tmp_path / "written", few_layers=True).read_bytes()
    snapshot = home / "hf/hub/models--org--cached/snapshots/abc"
    write(snapshot / "m-Q8_0.gguf", model)
    write(snapshot.parents[1] / "refs/main", b"abc\n")
    write(home / "hf/hub/models--org--empty/refs/main", b"gone")
    write(home / ".lmstudio/models/maker/studio/s-Q4_K_M.gguf", model)
    ollama = home / ".ollama/models"
    write(ollama / "blobs/sha256-12ab", model)
    manifest(ollama / "manifests/registry.ollama.ai/library/tiny/1b", "sha256:12ab")
    manifest(ollama / "manifests/registry.ollama.ai/maker/own/latest", "sha256:12ab")
    manifest(ollama / "manifests/hf.co/org/repo/Q8_0", "sha256:12ab")
    manifest(ollama / "manifests/registry.ollama.ai/library/half/latest", "sha256:missing")
    write(ollama / "manifests/registry.ollama.ai/library/broken/latest", b"{")
    return home


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def manifest(path: Path, digest: str) -> None:
    layers = [
        {"mediaType": "other", "digest": "sha256:0"},
        {"mediaType": WEIGHTS, "digest": digest},
    ]
    write(path, json.dumps({"layers": layers}).encode())


def test_every_program_s_models_are_found_by_name(user: Path, tmp_path: Path) -> None:
    blob = user / ".ollama/models/blobs/sha256-12ab"
    found = {name: find_model(name, tmp_path / "home") for name in (
        "org/cached", "maker/studio:Q4_K_M", "ollama:tiny:1b", "ollama:maker/own",
        "ollama:hf.co/org/repo:Q8_0",
    )}  # fmt: skip
    assert found == {
        "org/cached": user / "hf/hub/models--org--cached/snapshots/abc/m-Q8_0.gguf",
        "maker/studio:Q4_K_M": user / ".lmstudio/models/maker/studio/s-Q4_K_M.gguf",
        "ollama:tiny:1b": blob,
        "ollama:maker/own": blob,
        "ollama:hf.co/org/repo:Q8_0": blob,
    }
    assert [owner_of(path) for path in found.values()] == [
        "Hugging Face's cache", "LM Studio", *["ollama"] * 3,
    ]  # fmt: skip


def test_a_model_that_ollama_has_not_is_refused_with_those_it_has(
    user: Path, tmp_path: Path
) -> None:
    assert find_ollama("ollama:../../../etc") is None
    with pytest.raises(FormatError, match=r"no model 'half' on this disk\. It has ollama:hf"):
        find_model("ollama:half", tmp_path)


def test_names_and_listed_names_are_the_same(user: Path, tmp_path: Path) -> None:
    listed = other_models()
    assert [model.owner for model in listed] == [
        "Hugging Face's cache", "LM Studio", *["ollama"] * 3,
    ]  # fmt: skip
    for model in listed:
        assert find_model(model.name, tmp_path / "home") == model.path
    assert len(list(ollama_models())) == 3


def test_other_programs_models_are_listed_and_never_removed(
    user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--home", str(tmp_path / "home"), "--aliases", str(tmp_path / "aliases.json")]
    assert run_command(["list", "--json", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert {row["name"]: row["owner"] for row in rows}["ollama:tiny:1b"] == "ollama"
    assert all(row["family"] == "llama" and row["error"] is None for row in rows)
    assert run_command(["list", *flags]) == 0
    assert "[LM Studio]" in capsys.readouterr().out
    for row in rows:
        assert run_command(["rm", row["name"], "--yes", "--outside", *flags]) == 2
        told = capsys.readouterr().err
        assert f"belongs to {row['owner']}: nothing was deleted" in " ".join(told.split())
        assert Path(row["path"]).is_file()


def test_a_model_of_ollama_runs(
    user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--home", str(tmp_path / "home"), "--context", "64", "--max-tokens", "3"]
    assert run_command(["run", "ollama:tiny:1b", "Hello", "--raw", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 3
