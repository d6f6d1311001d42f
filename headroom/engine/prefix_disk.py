"""PrefixDisk: moves prefixes between the caches of the stages and the files of a folder."""

import hashlib
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from headroom import __version__
from headroom.engine.pages import PagePool
from headroom.engine.prefix_cache import PrefixCache, Snapshot
from headroom.engine.prefix_folder import (
    GoneError,
    Loading,
    PrefixFolder,
    StoredEntry,
    key_digest,
    owner_digest,
)
from headroom.engine.sequence import Sequence as Running
from headroom.errors import DeviceError
from headroom.options import Options
from headroom.plan.plan import Plan
from headroom.split.pipeline import Pipeline
from headroom.units import parse_size

LEAST_PAGES = 4  # shorter prefixes are computed sooner than they are read
WRITTEN_SNAPSHOTS = 3  # of one prefix: the longest ones
MOST_HELD = 2  # while requests run, at most one page in so many is held for files


class CacheBytes(Protocol):
    """Tells what all caches hold, as bytes in host memory."""

    def settle(self) -> None:
        """Let the caches hold what all launched steps write; only the engine's thread may ask."""

    def read_page(self, page: int) -> torch.Tensor:
        """Return a page as bytes; any thread may ask."""

    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Fill a page with what `read_page` has returned."""

    def read_snapshot(self, snapshot: int) -> torch.Tensor:
        """Return a snapshot as bytes; any thread may ask."""

    def write_snapshot(self, snapshot: int, data: torch.Tensor) -> None:
        """Fill a snapshot with what `read_snapshot` has returned."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFiles:
    """A folder for prefixes, and the caches whose bytes it has."""

    folder: PrefixFolder
    caches: CacheBytes


@dataclass(slots=True, eq=False)
class _Written:
    """What is held until the thread of the folder has read it, to write it."""

    pages: list[int]
    snapshots: list[Snapshot]
    picks: torch.Tensor | None  # of experts
    let_go: bool = False


class PrefixDisk:
    """Writes prefixes to files when requests end, and reads them for requests that begin alike.

    The folder's thread reads and writes, and copies from the caches. The engine's thread calls all
    methods, and fills pages with what was read.
    """

    def __init__(
        self,
        files: PrefixFiles,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        logits: torch.Tensor,  # float32 [snapshots, vocabulary]: those after each snapshot
    ) -> None:
        self._folder, self._caches, self._logits = files.folder, files.caches, logits
        self._pool, self._cache, self._page_size = pool, cache, page_size
        self._written: queue.SimpleQueue[_Written] = queue.SimpleQueue()
        self._held = 0  # pages
        self._loads: list[tuple[Running, Loading]] = []
        self._given_up = 0  # how often all files under way were given up
        self.hits = 0

    @property
    def files(self) -> int:
        """The files that these caches can read."""
        return self._folder.stored_files

    @property
    def file_bytes(self) -> int:
        """The bytes of all files in the folder."""
        return self._folder.stored_bytes

    @property
    def busy(self) -> bool:
        """Whether files are being read for requests, or written from pages that are held."""
        return bool(self._loads) or self._held > 0

    @property
    def has_news(self) -> bool:
        """Whether there is something to collect."""
        return not self._written.empty() or any(load.done for _, load in self._loads)

    def find(self, sequence: Running) -> None:
        """Begin to read a file, if it has more of a sequence's prompt than the caches have."""
        key, tokens = sequence.request.cache_key, sequence.tokens
        if sequence.loading is not None or key is None:
            return
        most = min(len(tokens) - sequence.unread, len(tokens) - 1)
        known = tokens[: len(tokens) - sequence.unread]
        stored = self._folder.find(key_digest(key), known, most)
        least = sequence.cached + LEAST_PAGES * self._page_size
        if stored is None or stored.tokens < least or self._pages(stored.tokens) > self._pool.free:
            return
        sequence.loading = self._folder.load(stored)
        self._loads.append((sequence, sequence.loading))

    def store(self, key: str, tokens: Sequence[int], own_pages: int) -> None:
        """Begin to write what the caches keep of a prefix, unless a file has nearly all of it.

        `own_pages`: those of the sequence that has computed it, and is about to end.
        """
        snapshots: list[Snapshot] = []
        end = len(tokens) // self._page_size * self._page_size
        if self._cache.needs_snapshots:
            snapshots = self._cache.snapshots_of(key, tokens)[:WRITTEN_SNAPSHOTS]
            end = snapshots[0].position if snapshots else 0
        if end < LEAST_PAGES * self._page_size:
            return
        digest = key_digest(key)
        known = self._folder.find(digest, tokens, end)
        if known is not None and known.tokens > end - self._page_size:
            return
        pages = self._cache.known_pages(key, tokens[:end])
        tail = snapshots[0].tail_spot if snapshots else None
        if tail is not None and tail.page >= 0:
            pages.append(tail.page)
        alone = self._pool.used <= self._held + own_pages
        too_many = not alone and MOST_HELD * (self._held + len(pages)) > self._pool.total
        if len(pages) != self._pages(end) or too_many:
            return
        picks = self._cache.picks_of(key, tokens[:end])
        held = _Written(pages, snapshots, picks)
        ends = [snapshot.position for snapshot in snapshots]
        logits = [snapshot.position for snapshot in snapshots if snapshot.has_logits]
        self._caches.settle()
        self._hold(held)
        if not self._folder.store(
            *(digest, tokens[:end], ends, logits, () if picks is None else picks.shape),
            self._blocks(held, self._given_up),
            lambda: self._written.put(held),
        ):
            self._let_go(held)

    def collect(self) -> None:
        """Fill pages with what was read, and let go of what was written."""
        while not self._written.empty():
            self._let_go(self._written.get())
        for sequence, loading in self._loads:
            if loading.done:  # it may become so at any moment
                loading.collected = True
                if loading.pages:
                    self._take(sequence, loading)
        self._loads = [(sequence, load) for sequence, load in self._loads if not load.collected]

    def entries(self, owner: str) -> list[StoredEntry]:
        """Return what is told of the files of an owner's prefixes."""
        return self._folder.entries(owner_digest(owner))

    def forget(self, owner: str) -> None:
        """Remove the files of an owner's prefixes, after those that are being written."""
        self._folder.forget(owner_digest(owner))

    def give_up(self) -> None:
        """Write nothing more of what the caches hold: it is lost, or its pages are needed."""
        self._given_up += 1

    def close(self) -> None:
        """Wait until everything is written, and end the folder's thread."""
        self._folder.close()
        self.collect()

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _blocks(self, held: _Written, given_up: int) -> Iterator[memoryview]:
        """Yield the blocks of a file; stop if it is given up meanwhile.

        What was read before the caches lost it is right. What was read later may be of another
        prefix.
        """
        slots = [snapshot.slot for snapshot in held.snapshots]
        reads = [partial(self._caches.read_page, page) for page in held.pages]
        reads += [partial(self._caches.read_snapshot, slot) for slot in slots]
        for read in reads:
            try:
                block = read()
            except DeviceError as error:
                raise GoneError(error.message) from error
            if self._given_up != given_up:
                raise GoneError("The caches have lost it, or need its pages.")
            yield block.numpy().data
        for snapshot in held.snapshots:
            if snapshot.has_logits:
                yield self._logits[snapshot.slot].view(torch.uint8).numpy().data
        if held.picks is not None:
            yield held.picks.view(torch.uint8).flatten().numpy().data
        self._written.put(held)  # before the disk has all of it, which may take long

    def _hold(self, held: _Written) -> None:
        self._pool.share(held.pages)
        self._held += len(held.pages)
        for snapshot in held.snapshots:
            snapshot.holds += 1

    def _let_go(self, held: _Written) -> None:
        if held.let_go:
            return
        held.let_go = True
        self._pool.give_back(held.pages)
        self._held -= len(held.pages)
        for snapshot in held.snapshots:
            self._cache.let_go(snapshot)

    def _take(self, sequence: Running, loading: Loading) -> None:
        """Make a prefix of what was read, as if a request had just computed it."""
        key, stored = sequence.request.cache_key, loading.stored
        assert key is not None
        tokens = sequence.tokens[: stored.tokens]
        known = self._cache.known_pages(key, tokens)
        needed = len(loading.pages) - len(known)
        self._pool.share(known)
        if needed > self._pool.free:
            self._pool.give_back(known)
            return
        pages = [*known, *self._pool.take(needed)]
        self._caches.settle()  # a page may have belonged to a sequence of the last step
        for page, block in zip(pages[len(known) :], loading.pages[len(known) :], strict=True):
            self._caches.write_page(page, _tensor(block))
        self._cache.keep(key, tokens, pages)
        if loading.snapshot is not None:
            slot = self._cache.take_snapshot_slot()
            if slot is not None:
                self._caches.write_snapshot(slot, _tensor(loading.snapshot))
                has_logits = loading.logits is not None
                if loading.logits is not None:
                    self._logits[slot] = _tensor(loading.logits).view(torch.float32)
                self._cache.keep_snapshot(
                    key, tokens, pages, slot, passing=False, has_logits=has_logits
                )
        if loading.picks is not None:
            picks = _tensor(loading.picks).view(torch.float32)
            self._cache.keep_picks(key, tokens, [len(tokens)], picks.view(stored.head.picks))
        self._pool.give_back(pages)
        self.hits += 1


def _tensor(block: bytes) -> torch.Tensor:
    if not block:  # layers with windows or states alone have nothing in pages
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(block), dtype=torch.uint8)


def open_prefix_files(
    identity: str, plan: Plan, pipeline: Pipeline, options: Options
) -> PrefixFiles | None:
    """Open the folder of prefixes of a model; None if there is to be none.

    Only caches of the same model, with the same types, kernels and stages, read each other's files.
    """
    if options.cache_dir is None or options.no_prefix_cache:
        return None
    caches, settings = pipeline.cache_files, plan.settings
    stages = [
        (device.layers, x.k_type, x.v_type, x.compute_type, x.kernels, x.weights, x.handover_type)
        for device in plan.devices
        for x in (device.settings,)
    ]
    chunk = settings.chunk if settings.exact_batch else 0  # its steps begin at fixed tokens
    told = repr((__version__, identity, stages, caches.layout, chunk)).encode()
    folder = PrefixFolder(
        Path(options.cache_dir).expanduser(),
        hashlib.blake2b(told, digest_size=16).hexdigest(),
        settings.page_size,
        parse_size(options.cache_bytes, "cache_bytes"),
        needs_snapshots=pipeline.needs_snapshots,
    )
    return PrefixFiles(folder, caches)
