"""`headroom list`: every model on this machine with its size, types and names."""

import json
import shutil
from pathlib import Path

import gguf
import pytest

from headroom.cli.main import run_command
from tests.synth_models import write_model


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a pulled file of a repository, half a download, and no model."""
    home = tmp_path / "home"
    model = write_model("llama", "q8_0", tmp_path / "written", few_layers=True)
    folder = home / "models" / "org--repo"
    folder.mkdir(parents=True)
    shutil.copy(model, folder / "m.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "half-00001-of-00002.gguf").write_bytes(b"GGUF")
    return home


def test_models_are_listed_with_what_their_files_say(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copy(home / "models/org--repo/m.gguf", tmp_path / "mine.gguf")
    flags = ["--home", str(home), "--aliases", str(tmp_path / "aliases.json")]
    assert run_command(["alias", "coder", "org/repo:m.gguf", *flags]) == 0
    assert run_command(["alias", "mine", str(other), *flags]) == 0
    assert run_command(["alias", "gone", "org/none:x.gguf", *flags]) == 0
    capsys.readouterr()
    assert run_command(["list", "--json", *flags]) == 0
    table = json.loads(capsys.readouterr().out)
    found = {row["name"]: row for row in table["models"]}
    broken, half = "org/repo:broken.gguf", "org/repo:half-00001-of-00002.gguf"
    assert list(found) == [broken, half, "org/repo:m.gguf", str(other)]
    model = found["org/repo:m.gguf"]
    path = home / "models" / "org--repo" / "m.gguf"
    reader = gguf.GGUFReader(path)
    assert model["size_bytes"] == path.stat().st_size
    assert model["parameters"] == sum(int(x.n_elements) for x in reader.tensors)
    assert model["context"] == reader.fields["llama.context_length"].contents()
    assert (model["family"], model["quantisation"], model["format"]) == ("llama", "q8_0", "gguf")
    assert (model["aliases"], found[str(other)]["aliases"]) == (["coder"], ["mine"])
    assert found[broken]["family"] is None
    assert "broken.gguf" in found[broken]["error"]
    assert found[half]["error"] == "the download did not end"


def test_people_see_a_table_or_how_to_get_a_model(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["list", "--home", str(home)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "size", "quantisation", "family", "context", "modified"]
    assert any(row.startswith("org/repo:m.gguf") and " llama " in row for row in rows)
    assert sum("cannot be read" in row for row in rows) == 1
    assert rows[-1] == "org/repo:half-00001-of-00002.gguf: the download did not end"
    empty = tmp_path / "empty"
    assert run_command(["list", "--home", str(empty)]) == 0
    assert capsys.readouterr().out == (
        f"There are no models in {empty}. Get one with: headroom pull\n"
    )
