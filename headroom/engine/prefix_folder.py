"""PrefixFolder: prefixes in files, written and read by a thread of its own."""

import hashlib
import logging
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headroom.engine.prefix_file import (
    SUFFIX,
    DamagedFileError,
    PrefixHead,
    read_blocks,
    read_head,
    write_prefix,
)
from headroom.errors import HeadroomError, OptionError
from headroom.units import gib

log = logging.getLogger(__name__)

STALE_S = 600.0  # age at which an unfinished file has no writer any more
PAUSE_S = 60.0  # after a write that failed, nothing is written for so long


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """The part of a file that a prompt begins with."""

    path: Path
    head: PrefixHead
    tokens: int
    snapshot: int | None  # the number of the snapshot after these tokens; None: pages are enough

    @property
    def blocks(self) -> list[int]:
        """The blocks that have this part: pages, a snapshot, the logits after it, and picks."""
        head, found = self.head, list(range(self.head.pages_of(self.tokens)))
        if self.snapshot is not None:
            found.append(head.pages + self.snapshot)
        if self.has_logits:
            found.append(head.pages + len(head.snapshots) + head.logits.index(self.tokens))
        if self.has_picks:
            found.append(len(head.sizes) - 1)
        return found

    @property
    def has_picks(self) -> bool:
        """Whether the file has the picks of experts, and these are nearly all of its tokens."""
        head = self.head
        return bool(head.picks) and head.pages_of(len(head.tokens) - self.tokens) <= 1

    @property
    def has_logits(self) -> bool:
        """Whether the file has the logits after the last of these tokens."""
        return self.snapshot is not None and self.tokens in self.head.logits


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """What is told of a file."""

    tokens: int
    size_bytes: int
    snapshots: int
    idle_s: float  # since it was last written or read


@dataclass(slots=True, eq=False)
class Loading:
    """A prefix that is being read; the blocks are there when the folder's thread sets `done`."""

    stored: StoredPrefix
    done: bool = False
    collected: bool = False  # the engine's thread has taken what was read
    pages: Sequence[bytes] = ()  # none if the file could not be read
    snapshot: bytes | None = None
    logits: bytes | None = None
    picks: bytes | None = None


class GoneError(HeadroomError):
    """What was being written to a file is lost; the file is not made."""


class PrefixFolder:
    """The prefix files of a folder that fit one layout of caches.

    Several processes may use one folder: files are renamed when they are whole, and a file that
    another process removes is a prefix that is not there any more.
    """

    def __init__(
        self,
        folder: Path,
        layout: str,  # of the caches: files of other layouts are left alone
        page_size: int,
        most_bytes: int,
        *,
        needs_snapshots: bool,
    ) -> None:
        self._folder, self._layout, self._most_bytes = folder, layout, most_bytes
        self._page_size = page_size
        self._needs_snapshots = needs_snapshots
        self._lock = threading.Lock()  # guards the index, which two threads use
        self._heads: dict[Path, PrefixHead] = {}
        self._by_start: dict[tuple[str, tuple[int, ...]], list[Path]] = defaultdict(list)
        self._listed_at = 0  # the folder's time of change when it was last listed
        self._paused_until = 0.0
        self._failing = False  # the last file could not be written
        self.stored_bytes = self.stored_files = 0
        self.on_done: Callable[[], None] = lambda: None  # called by the thread after each job
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._refresh()
        except OSError as error:
            raise OptionError(
                f"The folder of the prefix cache cannot be used: {error}.",
                hint="Give another folder as --cache-dir.",
                param="cache_dir",
            ) from error
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = 0  # jobs that are not done
        self._thread = threading.Thread(target=self._run, name="headroom-prefixes", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether jobs are waiting or under way."""
        return self._waiting > 0

    def find(self, key: str, tokens: Sequence[int], most: int) -> StoredPrefix | None:
        """Return the file with the longest beginning of `most` tokens; None: there is none.

        One that has logits may end with the last token, even beyond `most`.
        """
        self._refresh_later()
        best = None
        with self._lock:
            for path, head in self._candidates(key, tokens):
                shared = common_length(head.tokens, tokens, min(len(tokens), len(head.tokens)))
                found = self._usable(path, head, shared, most)
                if found is not None and (best is None or found.tokens > best.tokens):
                    best = found
        return best

    def load(self, stored: StoredPrefix) -> Loading:
        """Begin to read a part of a file."""
        loading = Loading(stored)

        def read() -> None:
            try:
                blocks = read_blocks(stored.path, stored.head, stored.blocks)
                os.utime(stored.path)  # the files that were not used for longest go first
                if stored.has_picks:
                    loading.picks = blocks.pop()
                if stored.has_logits:
                    loading.logits = blocks.pop()
                if stored.snapshot is not None:
                    loading.snapshot = blocks.pop()
                loading.pages = blocks
            except (OSError, DamagedFileError) as error:
                log.warning("prefix cache: a file is not used: %s", error)
                self._forget(stored.path, delete=isinstance(error, DamagedFileError))
            finally:
                loading.done = True

        self._add(read)
        return loading

    def store(
        self,
        key: str,
        tokens: Sequence[int],
        snapshots: Sequence[int],
        logits: Sequence[int],
        picks: Sequence[int],
        blocks: Iterable[memoryview],
        done: Callable[[], None],
    ) -> bool:
        """Begin to write a prefix; `done` is called when its blocks are not read any more.

        Return False if nothing can be written now.
        """
        if time.monotonic() < self._paused_until:
            return False
        head = PrefixHead(
            layout=self._layout,
            key=key,
            tokens=tuple(tokens),
            page_size=self._page_size,
            snapshots=tuple(snapshots),
            logits=tuple(logits),
            picks=tuple(picks),
        )

        def write() -> None:
            path = self._folder / _name(head)
            try:
                size = write_prefix(path, head, blocks)
                if self._failing:
                    self._failing = False
                    log.info("prefix cache: files are written to %s again", self._folder)
                self._learn(path, read_head(path))
                self._drop_shorter(head, path)
                self._shrink()
                log.debug("prefix cache: wrote %d tokens, %s", len(tokens), gib(size))
            except GoneError as error:
                log.info("prefix cache: %d tokens are not written: %s", len(tokens), error)
            except (OSError, DamagedFileError) as error:
                self._paused_until = time.monotonic() + PAUSE_S
                if not self._failing:
                    log.warning(
                        "prefix cache: nothing is written to %s, which is tried again every %.0f "
                        "s; prefixes are kept in memory: %s",
                        *(self._folder, PAUSE_S, error),
                    )
                self._failing = True
            finally:
                done()

        self._add(write)
        return True

    def entries(self, owner: str) -> list[StoredEntry]:
        """Return what is told of the files whose key has an owner's digest."""
        with self._lock:
            found = [(x, y) for x, y in self._heads.items() if y.key.startswith(f"{owner}.")]
        entries = []
        for path, head in found:
            with suppress(OSError):  # another process has removed it
                facts = path.stat()
                idle_s = max(0.0, time.time() - facts.st_mtime)
                tokens, snapshots = len(head.tokens), len(head.snapshots)
                entries.append(StoredEntry(tokens, facts.st_size, snapshots, idle_s))
        return entries

    def forget(self, owner: str) -> None:
        """Remove the files whose key has an owner's digest, after the present jobs."""

        def remove() -> None:
            self._refresh()
            for path, head in list(self._heads.items()):
                if head.key.startswith(f"{owner}."):
                    self._forget(path, delete=True)
            self._shrink()

        self._add(remove)

    def close(self) -> None:
        """Finish the jobs and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _add(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._waiting += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("prefix cache: a file could not be handled")
            with self._lock:
                self._waiting -= 1
            self.on_done()

    def _candidates(self, key: str, tokens: Sequence[int]) -> Iterable[tuple[Path, PrefixHead]]:
        """Return the files of a key that begin with the same page as some tokens."""
        paths = self._by_start.get((key, tuple(tokens[: self._page_size])), ())
        return [(path, self._heads[path]) for path in paths]

    def _usable(self, path: Path, head: PrefixHead, shared: int, most: int) -> StoredPrefix | None:
        """Return the part of a file that a prompt with `shared` equal tokens can begin with."""
        if not self._needs_snapshots:
            whole = min(shared, most) // head.page_size * head.page_size
            return StoredPrefix(path, head, whole, None) if whole else None
        ends = [
            (end, number)
            for number, end in enumerate(head.snapshots)
            if end <= (shared if end in head.logits else min(shared, most))
        ]
        if not ends:
            return None
        end, number = max(ends)
        return StoredPrefix(path, head, end, number)

    def _refresh_later(self) -> None:
        """Read the heads of new files soon, if another process has changed the folder."""
        with suppress(OSError):
            if self._folder.stat().st_mtime_ns != self._listed_at and not self.busy:
                self._add(self._refresh)

    def _refresh(self) -> None:
        """Read the heads of new files; forget those that are gone, remove damaged ones."""
        self._listed_at = self._folder.stat().st_mtime_ns
        there = set(self._folder.glob(f"*{SUFFIX}"))
        for path in set(self._heads) - there:
            self._forget(path)
        for path in there - set(self._heads):
            try:
                head = read_head(path)
            except DamagedFileError as error:
                log.warning("prefix cache: a file is removed: %s", error)
                self._forget(path, delete=True)
            except OSError:  # another process has removed it
                continue
            else:
                if head.layout == self._layout:
                    self._learn(path, head)
        self._shrink()

    def _learn(self, path: Path, head: PrefixHead) -> None:
        with self._lock:
            if path not in self._heads:
                self._by_start[head.key, head.tokens[: head.page_size]].append(path)
            self._heads[path] = head

    def _forget(self, path: Path, *, delete: bool = False) -> None:
        if delete:
            with suppress(OSError):
                path.unlink()
        with self._lock:
            head = self._heads.pop(path, None)
            if head is not None:
                start = head.key, head.tokens[: head.page_size]
                self._by_start[start].remove(path)
                if not self._by_start[start]:
                    del self._by_start[start]

    def _drop_shorter(self, head: PrefixHead, new: Path) -> None:
        """Remove files of which a new one has all tokens, snapshots and logits."""
        with self._lock:
            found = self._candidates(head.key, head.tokens)
        for path, other in found:
            length = len(other.tokens)
            covered = head.tokens[:length] == other.tokens
            states = set(other.snapshots) <= set(head.snapshots)
            logits = set(other.logits) <= set(head.logits)
            if path != new and covered and states and logits:
                self._forget(path, delete=True)

    def _shrink(self) -> None:
        """Remove the files that were not used for longest, of any layout, until all fit."""
        files = []
        for path in self._folder.iterdir():
            with suppress(OSError):
                facts = path.stat()
                if path.suffix == SUFFIX:
                    files.append((facts.st_mtime, facts.st_size, path))
                elif path.suffix == ".unfinished" and time.time() - facts.st_mtime > STALE_S:
                    path.unlink()
        total = sum(size for _, size, _ in files)
        files.sort()
        for _, size, path in files:
            if total <= self._most_bytes:
                break
            self._forget(path, delete=True)
            total -= size
        self.stored_bytes, self.stored_files = total, len(self._heads)


def owner_of(key: str) -> str:
    """Return whose prefixes have a cache key: what stands before its first zero character."""
    return key.partition("\0")[0]


def key_digest(key: str) -> str:
    """Return what a file says of a cache key: enough to tell keys apart, and not the key."""
    return f"{owner_digest(owner_of(key))}.{_digest(key)}"


def owner_digest(owner: str) -> str:
    """Return what a file says of the owner of a cache key."""
    return _digest(owner)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def common_length(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return how many of the first `most` tokens two sequences have in common."""
    low, high = 0, most  # the first `low` tokens are alike, those after `high` do not count
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(one[low:middle]) == tuple(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _name(head: PrefixHead) -> str:
    """Return the name of a file, which follows from the prefix and the layout of the caches."""
    told = repr((head.layout, head.key, head.tokens)).encode()
    return hashlib.blake2b(told, digest_size=16).hexdigest() + SUFFIX
