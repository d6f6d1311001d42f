"""Writes large files from pieces that threads prepare; a file gets its name when it is complete."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from headroom.errors import FormatError
from headroom.units import gib

Piece = bytes | np.ndarray[Any, Any]  # contiguous
Job = Callable[[], Piece]  # makes the next piece of a file; any thread may run it

AHEAD = 4  # pieces that each thread may be ahead of the disk
SPARE_BYTES = 64 << 20  # left free on a disk


def ignore(_: int) -> None:
    """Do nothing: the progress callback if none is given."""


def write_pieces(
    path: Path, jobs: Iterable[Job], *, threads: int = 1, progress: Callable[[int], None] = ignore
) -> None:
    """Write pieces in order under a temporary name, then give the file its own name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb", buffering=0) as file:
            for piece in in_order(jobs, threads):
                view = memoryview(piece).cast("B")  # type: ignore[arg-type]
                file_write_all(file.write, view)
                progress(len(view))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def file_write_all(write: Callable[[memoryview], int | None], view: memoryview) -> None:
    """Write a whole piece; the system takes at most 2 GiB at once."""
    while view:
        view = view[write(view) or 0 :]


def in_order(jobs: Iterable[Job], threads: int) -> Iterator[Piece]:
    """Yield the results of the jobs in order, while threads run the next jobs."""
    waiting: deque[Future[Piece]] = deque()
    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def check_space(path: Path, needed_bytes: int) -> None:
    """Refuse a file that the disk has no room for."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if needed_bytes + SPARE_BYTES > free:
        raise FormatError(
            f"{path} needs {gib(needed_bytes)} and {folder} has {gib(free)} free.",
            hint="Try a smaller model, --layers, or another folder.",
        )
