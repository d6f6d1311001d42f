"""Machine code of kernels kept on disk, so that only the first start waits for the compiler."""

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headroom.formats.atomic import UNFINISHED, replacing, write_all

log = logging.getLogger(__name__)

MAX_CODE_BYTES = 256 << 20  # of all code in the folder; one model needs about 4 MiB
_SUFFIX = ".cubin"
_DIGEST_BYTES = hashlib.sha256().digest_size


class CodeCache:
    """A folder of compiled kernels; a file's name is a digest of everything the code depends on.

    The cache only saves time. If a file cannot be read or written, the kernel is compiled, and one
    warning is logged.
    """

    def __init__(self, max_bytes: int = MAX_CODE_BYTES) -> None:
        self._folder: Path | None = None
        self._max_bytes = max_bytes
        self._told = False  # whether a problem has been logged
        self._telling = threading.Lock()

    def open(self, home: Path) -> None:
        """Keep code below a home folder from now on; without this call no code is kept."""
        self._folder = code_folder(home)
        self._told = False

    def load(self, key: str) -> bytes | None:
        """Return the code of a key; None if there is none, or if its file is damaged."""
        if self._folder is None:
            return None
        path = self._folder / (key + _SUFFIX)
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(error)
            return None
        digest, code = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if not code or hashlib.sha256(code).digest() != digest:
            self._tell(f"{path.name} is damaged")
            return None
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)  # used now: the files unused for longest are deleted first
        return code

    def save(self, key: str, code: bytes) -> bool:
        """Write the code of a key atomically and return whether that worked.

        Other processes never see half of a file.
        """
        if self._folder is None:
            return False
        try:
            with replacing(self._folder / (key + _SUFFIX)) as file:
                write_all(file, memoryview(hashlib.sha256(code).digest() + code))
            self._shrink()
        except OSError as error:
            self._tell(error)
            return False
        return True

    def _shrink(self) -> None:
        """Delete the files that were unused for longest until the rest fits into the limit."""
        assert self._folder is not None
        entries = sorted(_entries(self._folder), reverse=True)  # used most recently first
        total = 0
        for _, size_bytes, path in entries:
            total += size_bytes
            if total > self._max_bytes:
                path.unlink(missing_ok=True)

    def _tell(self, problem: object) -> None:
        with self._telling:
            told, self._told = self._told, True
        if not told:
            log.warning("kernels: code in %s is of no use: %s", self._folder, problem)


def code_folder(home: Path) -> Path:
    """Return the folder of compiled kernels; different GPUs and versions can share it."""
    return home / "kernels"


def kept_bytes(home: Path) -> int:
    """Return the bytes of compiled kernels below a home folder."""
    try:
        return sum(size_bytes for _, size_bytes, _ in _entries(code_folder(home)))
    except OSError:
        return 0


def code_key(*parts: str) -> str:
    """Return a digest of texts; it depends on their order and on where each one ends."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of last use, the bytes and the path of each file, unfinished ones included.

    Unfinished files are left by processes that were killed.
    """
    for path in (*folder.glob(f"*{_SUFFIX}"), *folder.glob(f".*{_SUFFIX}.*{UNFINISHED}")):
        try:
            facts = path.stat()
        except FileNotFoundError:  # another process deleted it
            continue
        yield facts.st_mtime, facts.st_size, path
