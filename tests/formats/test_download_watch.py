"""Downloads are watched by the size of their files."""

import threading
from pathlib import Path

import pytest

from headroom.formats import download_watch
from headroom.formats.download_watch import folder_bytes, watched


def test_what_comes_into_the_folder_is_reported_while_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_watch, "POLL_S", 0.001)
    (tmp_path / "earlier").write_bytes(b"1234")  # belongs to another download
    told: list[tuple[int, int | None]] = []
    half = threading.Event()

    def report(done: int, total: int | None) -> None:
        told.append((done, total))
        if done == 5:
            half.set()

    with watched(tmp_path, 10, report):
        (tmp_path / "below").mkdir()
        (tmp_path / "below" / "part.incomplete").write_bytes(b"12345")
        assert half.wait(20)
    assert (told[0], told[-2], told[-1]) == ((0, 10), (5, 10), (10, 10))


def test_a_download_that_fails_is_not_reported_as_whole(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    with pytest.raises(OSError, match="full"), watched(tmp_path, 10, lambda *x: told.append(x)):
        raise OSError("full")
    assert told == [(0, 10)]


def test_a_size_that_nobody_tells_stays_unknown(tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    with watched(tmp_path / "none", None, lambda *x: told.append(x)):
        pass
    assert told == [(0, None)]
    assert folder_bytes(tmp_path / "none") == 0
