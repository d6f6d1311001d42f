"""How files say which vector a text gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.formats.pooling import find_pooling
from tests.families.oracles import variant
from tests.optional import optional
from tests.tiny import llama_config, random_model, save_gguf

gguf = optional("gguf")


def gguf_with(path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None) -> Path:
    def add(writer: Any) -> None:
        if number is not None:
            writer.add_uint32("llama.pooling_type", number)

    finish = gguf.GGUFWriter.write_header_to_file

    def write(self: Any) -> None:
        add(self)
        finish(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", write)
    return save_gguf(random_model(llama_config()), path)


@pytest.mark.parametrize(
    ("number", "name"),
    [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank")],
)
def test_ggufs_number_names_the_pooling(
    number: int | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_with(tmp_path / "m.gguf", monkeypatch, number)
    assert find_pooling(open_checkpoint(path)) == name


def test_an_unknown_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_with(tmp_path / "m.gguf", monkeypatch, 9)
    with pytest.raises(FormatError, match=r"pooling_type is 9; known are mean \(1\)"):
        find_pooling(open_checkpoint(path))


def test_sentence_transformers_settings_name_the_pooling(tmp_path: Path) -> None:
    folder = variant("llama").save_safetensors(tmp_path)
    assert find_pooling(open_checkpoint(folder)) == "last"
    (folder / "1_Pooling").mkdir()
    settings = folder / "1_Pooling" / "config.json"
    settings.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert find_pooling(open_checkpoint(folder)) == "mean"
    settings.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(FormatError, match="chooses 0 of the known ways"):
        find_pooling(open_checkpoint(folder))
