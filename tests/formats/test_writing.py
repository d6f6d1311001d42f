"""Files written from pieces: in order, never more ahead than allowed, whole or not at all."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError
from headroom.formats.writing import AHEAD, SPARE_BYTES, Job, check_space, in_order, write_pieces


@given(st.lists(st.binary(max_size=20), max_size=40), st.integers(1, 3))
def test_pieces_come_in_order_whatever_threads_make_them(pieces: list[bytes], threads: int) -> None:
    jobs: list[Job] = [lambda piece=piece: piece for piece in pieces]  # type: ignore[misc]
    assert list(in_order(jobs, threads)) == pieces


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_has_all_pieces_and_progress_counts_their_bytes(
    tmp_path: Path, threads: int
) -> None:
    path, told = tmp_path / "new" / "file", list[int]()
    numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
    jobs: list[Job] = [lambda: b"head", lambda: numbers, lambda: b""]
    write_pieces(path, jobs, threads=threads, progress=told.append)
    assert path.read_bytes() == b"head" + numbers.tobytes()
    assert told == [4, 24, 0]


def test_a_failure_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail() -> bytes:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_pieces(path, [lambda: b"begun", fail], threads=2)
    assert [x.name for x in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"


def test_jobs_are_begun_only_a_few_ahead_of_the_disk() -> None:
    begun: list[int] = []

    def jobs() -> Iterator[Job]:
        for number in range(100):
            begun.append(number)
            yield lambda: b"x"

    pieces = in_order(jobs(), threads=2)
    next(pieces)
    assert len(begun) == 2 * AHEAD + 1
    pieces.close()  # type: ignore[attr-defined]


def test_a_file_that_does_not_fit_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = SPARE_BYTES + 1000

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    path = tmp_path / "not" / "there" / "file"
    check_space(path, 1000)
    with pytest.raises(FormatError, match=f"and {tmp_path} has"):
        check_space(path, 1001)
