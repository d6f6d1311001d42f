"""Files of prefixes: what is read is what was written, and any damage is noticed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.engine import prefix_file
from headroom.engine.prefix_file import (
    DamagedFileError,
    PrefixHead,
    read_blocks,
    read_head,
    write_prefix,
)

BLOCKS = [bytes([n]) * (40 + n) for n in range(6)]


def head(**changes: object) -> PrefixHead:
    given = {
        "layout": "l",
        "key": "k",
        "tokens": tuple(range(10)),
        "page_size": 4,
        "snapshots": (10,),
        "logits": (10,),
        "picks": (2, 3),
    }
    return PrefixHead(**(given | changes))  # type: ignore[arg-type]


def write(path: Path) -> PrefixHead:
    write_prefix(path, head(), map(memoryview, BLOCKS))
    return read_head(path)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.prefix"
    found = write(path)
    assert found.tokens == tuple(range(10))
    assert found.pages == 3
    assert found.sizes == (40, 41, 42, 43, 44, 45)
    assert read_blocks(path, found, range(6)) == BLOCKS
    assert read_blocks(path, found, [3, 0]) == [BLOCKS[3], BLOCKS[0]]
    assert [x.name for x in tmp_path.iterdir()] == ["a.prefix"]


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.prefix"
    found = write(path)
    data = path.read_bytes()
    random = Random("bits")
    for _ in range(500):
        at, bit = random.randrange(len(data)), random.randrange(8)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            read_blocks(path, read_head(path), range(6))
        with pytest.raises(DamagedFileError):
            read_blocks(path, found, range(6))
    path.write_bytes(data)
    assert read_blocks(path, found, range(6)) == BLOCKS


@given(length=st.integers(0, 600))
def test_a_file_that_is_cut_short_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.prefix"
    write(path)
    data = path.read_bytes()
    path.write_bytes(data[: min(length, len(data) - 1)])
    with pytest.raises(DamagedFileError):
        read_head(path)


def test_another_file_in_its_place_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.prefix"
    found = write(path)
    write_prefix(path, head(tokens=tuple(range(1, 11))), map(memoryview, BLOCKS))
    with pytest.raises(DamagedFileError, match="another file"):
        read_blocks(path, found, [0])


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.prefix"
    write(path)
    monkeypatch.setattr(prefix_file, "VERSION", 3)
    with pytest.raises(DamagedFileError, match="version 3"):
        read_head(path)


def test_nothing_is_left_when_a_write_fails(tmp_path: Path) -> None:
    def broken() -> object:
        yield memoryview(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_prefix(tmp_path / "a.prefix", head(), broken())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


WRITER = """
import sys
from pathlib import Path
from headroom.engine.prefix_file import PrefixHead, write_prefix
head = PrefixHead(layout="l", key="k", tokens=tuple(range(640)), page_size=64, snapshots=())
print("ready", flush=True)
number = 0
while True:
    number += 1
    blocks = (memoryview(bytes([number % 251]) * 200_000) for _ in range(10))
    write_prefix(Path(sys.argv[1]) / f"{number % 3}.prefix", head, blocks)
"""


def kill_writers(folder: Path, times: int) -> None:
    """Kill processes that write files, at random moments; check what they leave each time."""
    random = Random("kill")
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0.0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
        for path in folder.glob("*.prefix"):
            found = read_head(path)
            blocks = read_blocks(path, found, range(10))
            assert len(set(blocks)) == 1


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    kill_writers(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_killed_writers_leave_whole_files(tmp_path: Path) -> None:
    kill_writers(tmp_path, 200)
