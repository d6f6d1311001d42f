"""The models in the home folder: which files each has, and what removing one leaves."""

import os
from pathlib import Path

import pytest

from headroom.errors import FormatError
from headroom.formats.hub import COMPLETE, WheelModel
from headroom.formats.pulled import (
    is_inside,
    recorded_sha256,
    remove_model,
    stored_file,
    stored_models,
)

KNOWN = {
    "tiny": WheelModel(
        requirement="tiny", wheel_bytes=1, wheel_sha256="", member="in/Tiny.gguf", member_bytes=4,
        member_sha256="of the member",
    )
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder as pulls and `headroom bench` leave it; each file has as many bytes as said."""
    sizes = {
        "models/Tiny.gguf": 4,
        "models/mine.gguf": 5,
        "synth/llama-tiny-q8_0.gguf": 6,
        "models/org--repo/model.safetensors": 100,
        "models/org--repo/config.json": 10,
        f"models/org--repo/{COMPLETE}": 0,
        "models/org--repo/a.gguf": 30,
        "models/org--repo/a.gguf.routing.json": 2,
        "models/org--repo/deep/b-00001-of-00002.gguf": 40,
        "models/org--repo/deep/b-00002-of-00002.gguf": 41,
        "models/org--repo/.cache/huggingface/download/a.gguf.metadata": 3,
        "models/new--one/.cache/huggingface/download/x.incomplete": 7,
    }
    for name, size in sizes.items():
        file = tmp_path / ".cache" / "headroom" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    return tmp_path / ".cache" / "headroom"


def sizes(home: Path) -> dict[str, int]:
    return {model.name: model.size_bytes for model in stored_models(home, KNOWN)}


def test_every_model_is_listed_under_the_name_that_commands_take(home: Path) -> None:
    assert sizes(home) == {
        "tiny": 4,
        str(home / "models/mine.gguf"): 5,
        str(home / "synth/llama-tiny-q8_0.gguf"): 6,
        "new/one": 7,
        "org/repo:a.gguf": 32,
        "org/repo:deep/b-00001-of-00002.gguf": 81,
        "org/repo": 110,
    }
    incomplete = [model.name for model in stored_models(home, KNOWN) if not model.complete]
    assert incomplete == ["new/one"]
    assert stored_models(home / "nothing", KNOWN) == []


def test_half_a_model_is_listed_as_incomplete(home: Path) -> None:
    (home / "models/org--repo/deep/b-00002-of-00002.gguf").unlink()
    (home / "models/Tiny.gguf").write_bytes(b"xx")
    (home / "models/org--repo" / COMPLETE).unlink()
    incomplete = [model.name for model in stored_models(home, KNOWN) if not model.complete]
    assert incomplete == ["tiny", "new/one", "org/repo:deep/b-00001-of-00002.gguf", "org/repo"]


def remove(home: Path, name: str) -> int:
    found = stored_models(home, KNOWN)
    (model,) = [model for model in found if model.name == name]
    return remove_model(model, home, found).freed_bytes


def test_removing_one_model_leaves_all_others_and_counts_the_bytes(home: Path) -> None:
    before = sizes(home)
    for name in list(before):
        expected = before.pop(name)
        if name == "org/repo":  # the last one of its folder takes what the downloads left behind
            expected += 3
        assert remove(home, name) == expected
        assert sizes(home) == before
    assert list((home / "models").rglob("*")) == []


def test_a_file_that_another_model_needs_stays(home: Path) -> None:
    found = stored_models(home, KNOWN)
    (one,) = [model for model in found if model.name == "org/repo"]
    other = stored_file(one.path / "config.json")
    done = remove_model(one, home, [*found, other])
    assert set(done.kept) == set(one.files)
    assert (done.freed_bytes, done.removed) == (0, ())


def test_links_free_nothing_and_their_targets_stay(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.gguf"
    target.write_bytes(b"x" * 50)
    linked, hard = home / "models/linked.gguf", home / "models/hard.gguf"
    linked.symlink_to(target)
    os.link(target, hard)
    for path in (linked, hard):
        assert remove(home, str(path)) == 0
        assert not path.exists()
    assert target.read_bytes() == b"x" * 50
    assert remove(home, str(home / "models/mine.gguf")) == 5


def test_a_folder_outside_loses_its_weights_and_settings_and_nothing_else(
    home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "notes.txt", "results.json"):
        (folder / name).write_bytes(b"xy")
    model = stored_file(folder)
    assert not any(is_inside(file, home) for file in model.files)
    assert remove_model(model, home, stored_models(home, KNOWN)).freed_bytes == 4
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "results.json"]
    with pytest.raises(FormatError, match=r"holds no|There is no"):
        stored_file(folder)


def test_the_digest_that_a_download_recorded_is_found_until_the_file_changes(home: Path) -> None:
    file = home / "models/org--repo/a.gguf"
    notes = home / "models/org--repo/.cache/huggingface/download/a.gguf.metadata"
    assert recorded_sha256(file, home, KNOWN) is None  # the notes are no notes
    notes.write_text(f"c0ffee\n{'ab' * 32}\n{file.stat().st_mtime}\n")
    assert recorded_sha256(file, home, KNOWN) == "ab" * 32
    notes.write_text(f"c0ffee\nan-etag\n{file.stat().st_mtime}\n")
    assert recorded_sha256(file, home, KNOWN) is None
    notes.write_text(f"c0ffee\n{'ab' * 32}\n{file.stat().st_mtime - 10}\n")
    assert recorded_sha256(file, home, KNOWN) is None
    deep = home / "models/org--repo/deep/b-00001-of-00002.gguf"
    inner = notes.parent / "deep" / f"{deep.name}.metadata"
    inner.parent.mkdir()
    inner.write_text(f"c0ffee\n{'cd' * 32}\n{deep.stat().st_mtime}\n")
    assert recorded_sha256(deep, home, KNOWN) == "cd" * 32
    assert recorded_sha256(home / "models/Tiny.gguf", home, KNOWN) == "of the member"


def test_what_cannot_be_deleted_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(FormatError, match=r"Cannot remove .*Tiny\.gguf: Permission denied"):
        remove(home, "tiny")


def test_a_home_folder_holds_what_lies_in_it(home: Path, tmp_path: Path) -> None:
    assert is_inside(home / "models" / "m.gguf", home)
    assert not is_inside(home.parent / "headroom2" / "m.gguf", home)
    assert not is_inside(home / "models" / ".." / ".." / "m.gguf", home)
    assert not is_inside(home, home)
    (tmp_path / "data").mkdir()
    (home / "models" / "linked").symlink_to(tmp_path / "data")
    assert not is_inside(home / "models" / "linked" / "m.gguf", home)
    (home / "models" / "m.gguf").symlink_to(tmp_path / "data" / "m.gguf")
    assert is_inside(home / "models" / "m.gguf", home)
