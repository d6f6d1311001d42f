"""PrefixFolder: processes that share a folder, are killed or find damage serve no wrong prefix."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from headroom.engine.prefix_file import SUFFIX
from headroom.engine.prefix_folder import Loading, PrefixFolder

SIZE = 64  # tokens of a page
PAGES = 6


def tokens_of(number: int) -> list[int]:
    return Random(f"prefix {number}").choices(range(1000), k=SIZE * PAGES)


def block_of(tokens: list[int], at: int) -> bytes:
    """What the caches hold of a page: it follows from the tokens up to it."""
    return Random(str(tokens[: SIZE * (at + 1)])).randbytes(3000)


@contextmanager
def opened(path: Path, most_bytes: int = 1 << 30) -> Iterator[PrefixFolder]:
    folder = PrefixFolder(path, "layout", SIZE, most_bytes, needs_snapshots=False)
    try:
        yield folder
    finally:
        folder.close()


def store(folder: PrefixFolder, number: int) -> None:
    tokens = tokens_of(number)
    blocks = (memoryview(block_of(tokens, at)) for at in range(PAGES))
    written = threading.Event()
    assert folder.store("key", tokens, [], [], [], blocks, written.set)
    assert written.wait(20)


def loaded(folder: PrefixFolder, number: int) -> Loading | None:
    """Read what a folder has of a prefix; None: nothing that can be served."""
    tokens = tokens_of(number)
    stored = folder.find("key", tokens, len(tokens))
    if stored is None:
        return None
    loading = folder.load(stored)
    while not loading.done:
        time.sleep(0.001)
    if not loading.pages:
        return None
    assert list(loading.pages) == [block_of(tokens, at) for at in range(len(loading.pages))]
    return loading


def test_a_folder_serves_what_was_stored(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        for number in range(3):
            store(folder, number)
    with opened(tmp_path) as folder:
        found = [loaded(folder, number) for number in range(4)]
    assert [one is not None for one in found] == [True, True, True, False]


WRITER = """
import sys
from pathlib import Path
from random import Random
from tests.engine.test_prefix_folder import opened, store
with opened(Path(sys.argv[1]), int(sys.argv[3])) as folder:
    print("ready", flush=True)
    random = Random(sys.argv[2])
    while True:
        store(folder, random.randrange(40))
"""


def kill_folders(path: Path, times: int) -> None:
    """Kill one of two processes that write to a folder at random moments; serve what is left.

    The folder has room for half of the prefixes, so that files are removed all the time, too.
    """
    with opened(path) as folder:
        store(folder, 0)
        most_bytes = 20 * folder.stored_bytes
    random, served = Random("kill"), 0
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for round_ in range(times // 2):
        arguments = [[str(path), f"{round_} {one}", str(most_bytes)] for one in range(2)]
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, *given], stdout=subprocess.PIPE, env=environment
            )
            for given in arguments
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            time.sleep(random.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        with opened(path, most_bytes) as folder:
            files = len(list(path.glob(f"*{SUFFIX}")))
            assert files == folder.stored_files > 0
            found = sum(loaded(folder, number) is not None for number in range(40))
            assert found == files
            served += found
            store(folder, round_ % 40)  # it still works
            assert loaded(folder, round_ % 40) is not None
    assert served > times


def test_killed_processes_leave_a_folder_that_serves_nothing_wrong(tmp_path: Path) -> None:
    kill_folders(tmp_path, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_killed_processes_leave_a_folder_that_serves_nothing_wrong(
    tmp_path: Path,
) -> None:
    kill_folders(tmp_path, 200)


def flip_bits(path: Path, count: int) -> None:
    """Flip a bit of each of many files; check that no file is served, and that all are removed."""
    random = Random("bits")
    with opened(path) as folder:
        for number in range(count):
            store(folder, number)
        files = list(path.glob(f"*{SUFFIX}"))
        assert len(files) == count
        for file in files:
            data = bytearray(file.read_bytes())
            at = random.randrange(len(data))
            data[at] ^= 1 << random.randrange(8)
            file.write_bytes(data)
        # Those that this process has written, or known before, and those that a new one finds.
        assert not any(loaded(folder, number) for number in range(0, count, 2))
    with opened(path) as folder:
        assert not any(loaded(folder, number) for number in range(count))
        assert not list(path.glob(f"*{SUFFIX}"))
        store(folder, 0)
        assert loaded(folder, 0) is not None


def test_flipped_bits_are_refused(tmp_path: Path) -> None:
    flip_bits(tmp_path, 20)


@pytest.mark.slow
def test_flipped_bits_in_500_files_are_all_refused(tmp_path: Path) -> None:
    flip_bits(tmp_path, 500)
