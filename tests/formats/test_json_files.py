"""What is written never takes the place of something else."""

import json
import os
from pathlib import Path

import pytest

from headroom.errors import OptionError
from headroom.formats import json_files as files
from headroom.formats.json_files import FileKind, check_replaceable, read_object

STATISTICS = json.dumps({"version": 1, "model": "a", "saved_at": 0, "counts": []})
PLACEMENT = json.dumps({"version": 1, "model": "a", "hot": []})
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg"></svg>\n'
OWN: dict[FileKind, str] = {
    "routing statistics": STATISTICS, "placement": PLACEMENT, "picture": PICTURE,
    "routing trace": "headroom routing trace\n{}\n",
}  # fmt: skip
OTHERS = (
    "GGUF\x03\x00", "{", "[]", "[" * 100_000, "text", '{"model_type": "qwen3_moe"}',
    '{"version": "1.0", "truncation": null, "counts": 1, "hot": 1}', "<html>",
)  # fmt: skip


@pytest.mark.parametrize("kind", OWN)
def test_a_file_of_the_same_kind_an_empty_one_and_none_may_be_replaced(
    kind: FileKind, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    check_replaceable(path, kind, "out")
    for content in (OWN[kind], ""):
        path.write_text(content)
        check_replaceable(path, kind, "out", [tmp_path / "missing", tmp_path])


@pytest.mark.parametrize("kind", OWN)
def test_a_file_of_another_kind_is_refused(kind: FileKind, tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in (*OTHERS, *(text for other, text in OWN.items() if other != kind)):
        path.write_text(content)
        with pytest.raises(OptionError) as refused:
            check_replaceable(path, kind, "save_placement")
        assert refused.value.param == "save_placement"
        assert str(refused.value) == (
            f"{path} is there and is not a {kind} file; it is not written over. "
            "Name another file with --save-placement."
        )
        assert path.read_text() == content


@pytest.mark.parametrize("kind", OWN)
def test_a_folder_is_refused(kind: FileKind, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not written over"):
        check_replaceable(tmp_path, kind, "out")


def test_a_picture_may_go_to_a_device_and_a_table_not() -> None:
    check_replaceable(Path(os.devnull), "picture", "svg")
    with pytest.raises(OptionError, match="is not a placement file"):
        check_replaceable(Path(os.devnull), "placement", "out")


def test_a_file_of_the_model_is_refused_by_whatever_name(tmp_path: Path) -> None:
    model, other = tmp_path / "config.json", tmp_path / "link.json"
    model.write_text(PLACEMENT)  # even so
    other.symlink_to(model)
    for path in (model, other):
        with pytest.raises(OptionError) as refused:
            check_replaceable(path, "placement", "out", [model])
        assert str(refused.value) == (
            f"{path} is a file of the model; it is not written over. Name another file with --out."
        )


def test_a_large_file_is_no_table_and_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.truncate(65 << 20)
    monkeypatch.delattr(files.Path, "read_text")
    with pytest.raises(ValueError, match=r"it has 65\.0 MiB"):
        read_object(path)
    with pytest.raises(OptionError, match="is not a placement file"):
        check_replaceable(path, "placement", "out")
