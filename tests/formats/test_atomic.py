"""A file is replaced whole, or stays as it was."""

import errno
import os
import threading
from pathlib import Path

import pytest

from headroom.formats.atomic import is_disk_full, replace_text, replacing, write_all


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    replace_text(path, "ä")
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_text(path, "old")
    with pytest.raises(KeyError), replacing(path) as file:  # noqa: PT012
        file.write(b"half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_with_one_process_number_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers that share a folder
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        assert first.name != second.name
        write_all(first, memoryview(b"first"))
        write_all(second, memoryview(b"second"))
    assert path.read_text() == "first"  # the block of the first ends last
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_the_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, order = tmp_path / "file", []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(number: int) -> None:
        order.append("folder" if Path(f"/proc/self/fd/{number}").resolve().is_dir() else "file")
        real_fsync(number)

    def replace(self: Path, target: Path) -> Path:
        order.append("name")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    replace_text(path, "text")
    assert order == ["file", "name", "folder"]


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, path = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(path)
    replace_text(link, "text")
    assert link.is_symlink()
    assert path.read_text() == "text"


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    replace_text(path, "text")
    reader.join(timeout=30)
    assert read == ["text"]
    assert path.is_fifo()


def test_a_full_disk_is_recognised_through_other_errors() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("download failed")
    wrapped.__cause__ = full
    assert is_disk_full(full)
    assert is_disk_full(wrapped)
    assert is_disk_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_disk_full(None)
