"""Files that are replaced whole: a reader, also after a crash, sees the old or the new content."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

UNFINISHED = ".part"  # how the names of files end that are being written


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield an unbuffered file that replaces `path` when the block ends, unless by an error.

    The file is written under a random name in the same folder, so that writers on several machines
    that share the folder do not meet. A link stays a link: the file that it names is replaced. What
    is no file, such as a pipe or a terminal, is written as it is.
    """
    if path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as file:
            yield file
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
    try:
        with unfinished.open("xb", buffering=0) as file:
            yield file
        move(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a small file."""
    with replacing(path) as file:
        write_all(file, memoryview(text.encode()))


def write_all(file: IO[bytes], view: memoryview) -> None:
    """Write a whole piece to an unbuffered file; the system takes at most 2 GiB at once."""
    while view:
        view = view[file.write(view) or 0 :]


def move(complete: Path, path: Path) -> None:
    """Give a complete file its name, after its content is on the disk."""
    sync(complete)
    complete.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network file systems cannot do this for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
