"""Machine code of kernels kept on disk, so that only the first start waits for the compiler."""

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # what a folder may hold; a model needs some 4 MiB of code
_SUFFIX = ".cubin"
_DIGEST_BYTES = hashlib.sha256().digest_size


class CodeCache:
    """A folder of compiled kernels by a digest of all that they are made from.

    It only ever saves time: what cannot be read or written is compiled, and said once.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._folder: Path | None = None
        self._max_bytes = max_bytes
        self._told = False  # whether its trouble has been logged
        self._telling = threading.Lock()
        self._held: dict[str, bytes] = {}  # compiled ahead; no folder has it

    def open(self, home: Path) -> None:
        """Keep code below a home folder from now on; before, none is kept."""
        self._folder = code_folder(home)
        self._told = False

    def load(self, key: str) -> bytes | None:
        """Return the code of a key; None where there is none, or none that is whole."""
        held = self._held.pop(key, None)  # in one step: threads may ask at the same time
        return self._read(key) if held is None else held

    def has(self, key: str) -> bool:
        """Tell whether the code of a key can be loaded."""
        return key in self._held or self._read(key) is not None

    def hold(self, key: str, code: bytes) -> None:
        """Keep the code of a key, in memory until it is loaded where no folder takes it."""
        if not self.save(key, code):
            self._held[key] = code

    def _read(self, key: str) -> bytes | None:
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
        with suppress(OSError):  # a folder that may only be read
            os.utime(path)  # the oldest are deleted first, and this one is of use
        return code

    def save(self, key: str, code: bytes) -> bool:
        """Keep the code of a key, in one step, so that other processes never see half of it.

        Tell whether the folder took it.
        """
        if self._folder is None:
            return False
        # With the suffix, so that what a killed process leaves is deleted in its turn.
        writer = f"{os.getpid()}.{threading.get_ident()}"
        unfinished = self._folder / f".{key}.{writer}{_SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_bytes(hashlib.sha256(code).digest() + code)
                unfinished.replace(self._folder / (key + _SUFFIX))
            finally:
                unfinished.unlink(missing_ok=True)
            self._shrink()
        except OSError as error:
            self._tell(error)
            return False
        return True

    def _shrink(self) -> None:
        """Delete what was not used for longest until the rest is small enough."""
        assert self._folder is not None
        entries = sorted(_entries(self._folder), reverse=True)  # the newest first
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
    """Return where the code of kernels is kept; GPUs and versions of all kinds may share it."""
    return home / "kernels"


def kept_bytes(home: Path) -> int:
    """Return how much code is kept below a home folder."""
    try:
        return sum(size_bytes for _, size_bytes, _ in _entries(code_folder(home)))
    except OSError:
        return 0


def code_key(*parts: str) -> str:
    """Return a digest of texts in their order; other texts, other parts, another digest."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each file was last used, its bytes and its path."""
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            facts = path.stat()
        except FileNotFoundError:  # another process deleted it
            continue
        yield facts.st_mtime, facts.st_size, path
