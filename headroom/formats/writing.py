"""Writes large files from pieces that threads prepare; a file gets its name when it is complete."""

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from headroom.errors import FormatError
from headroom.formats.atomic import replacing, write_all
from headroom.units import gib

FilePiece = bytes | np.ndarray[Any, Any]  # contiguous
Job = Callable[[], FilePiece]  # makes the next piece of a file; any thread may run it

AHEAD = 4  # pieces that each thread may be ahead of the disk
SPARE_BYTES = 64 << 20  # left free on a disk


def ignore(_: int) -> None:
    """Do nothing: the progress callback if none is given."""


def write_pieces(
    path: Path, jobs: Iterable[Job], *, threads: int = 1, progress: Callable[[int], None] = ignore
) -> None:
    """Write pieces in order under a temporary name, then give the file its own name."""
    with replacing(path) as file:
        for piece in in_order(jobs, threads):
            view = memoryview(piece).cast("B")  # type: ignore[arg-type]
            write_all(file, view)
            progress(len(view))


def in_order(jobs: Iterable[Job], threads: int) -> Iterator[FilePiece]:
    """Yield the results of the jobs in order, while threads run the next jobs."""
    waiting: deque[Future[FilePiece]] = deque()
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
