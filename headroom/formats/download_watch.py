"""watched(): reports how much of a download has come, by the size of the files in its folder."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PullProgress = Callable[[int, int | None], None]  # bytes so far, bytes in all if known

POLL_S = 0.2


@contextmanager
def watched(folder: Path, total: int | None, report: PullProgress) -> Iterator[None]:
    """Report what has come into a folder since the block began, of `total` bytes, from a thread."""
    before, ended = folder_bytes(folder), threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            come = max(0, folder_bytes(folder) - before)
            report(come if total is None else min(come, total), total)

    report(0, total)
    thread = threading.Thread(target=watch, name="download-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if total is not None:
        report(total, total)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder and below it; those that vanish count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
