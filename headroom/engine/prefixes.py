"""Prefixes: keeps what requests have computed, and lets later requests begin after it."""

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from headroom.engine.host_pressure import HostPressure, HostTier
from headroom.engine.pages import PagePool
from headroom.engine.prefix_cache import HostPages, KeptPrefix, Prefix, PrefixCache
from headroom.engine.prefix_disk import PrefixDisk, PrefixFiles
from headroom.engine.prefix_folder import StoredEntry, common_length, owner_of
from headroom.engine.sampler import LogitRow
from headroom.engine.sequence import Sequence, UnconfirmedSnapshot
from headroom.layers.cache import CacheMover
from headroom.plan.settings import PlanSettings

log = logging.getLogger(__name__)

PASSING_SNAPSHOTS = 8  # most snapshots on the way through one prompt


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """What the prefix cache has done since the engine started."""

    cached_tokens: int  # prompt tokens that needed no computing
    hits: int  # requests whose prompt began with a known prefix
    misses: int  # requests that could have used a prefix, but none was known
    idle_pages: int  # pages that hold prefixes and that no request uses now
    snapshots: int
    evicted_pages: int
    evicted_snapshots: int
    host_pages: int = 0  # in host memory
    idle_bytes: int = 0  # of the idle pages
    host_bytes: int = 0  # of pages in host memory and of snapshots
    demoted_pages: int = 0  # moved to host memory
    promoted_pages: int = 0  # copied back to the devices
    files: int = 0  # that fit these caches
    file_bytes: int = 0  # of all files in the folder
    file_hits: int = 0  # requests whose prefix was read from a file


@dataclass(frozen=True, slots=True)
class PrefixEntries:
    """All prefixes of one owner."""

    kept: list[KeptPrefix]  # in the pages of devices and host memory
    page_bytes: int  # of each of their pages, in all stages together
    stored: list[StoredEntry]  # in files


class Prefixes:
    """The prefix cache of an engine; only the engine's thread uses it.

    A request's prompt is kept when its first token is read, since its steps have succeeded then.
    The answer is kept when the request ends. A model with recurrent layers or windows continues
    only from a snapshot: there is one at the end of prompts and answers, and at some cuts of long
    prompts. Cuts depend on the tokens before them alone, so that two prompts with the same
    beginning have the same cuts there.
    """

    def __init__(
        self,
        mover: CacheMover,
        pool: PagePool,
        settings: PlanSettings,
        files: PrefixFiles | None = None,
        page_bytes: int = 0,  # of all stages together
        snapshot_bytes: int = 0,  # the same
        logits: torch.Tensor | None = None,  # room for a row of each snapshot
    ) -> None:
        self._mover, self._chunk, self._page_size = mover, settings.chunk, settings.page_size
        self._needs_snapshots = mover.needs_snapshots
        # Prefixes end at cuts of prompts, where steps begin whatever is cached.
        self._exact = settings.exact_batch
        self.works = settings.prefix_cache and (settings.snapshots > 0 or not self._needs_snapshots)
        slots = settings.snapshots if self._needs_snapshots else None
        self._pool = pool
        self._host = HostPages(settings.host_pages if self.works else 0, mover.save_page)
        self._cache = PrefixCache(pool, self._page_size, slots, self._host)
        self._page_bytes, self._snapshot_bytes = page_bytes, snapshot_bytes
        tier = HostTier(self._host.total * page_bytes, (slots or 0) * snapshot_bytes)
        self.host_pressure = HostPressure(self._cache, mover, tier)
        self._logits = torch.empty(0, 0) if logits is None else logits
        self._disk: PrefixDisk | None = None
        if files is not None and self.works:
            self._disk = PrefixDisk(files, pool, self._cache, self._page_size, self._logits)
        self._cached_tokens = self._hits = self._misses = self._promoted = 0

    @property
    def counts(self) -> PrefixCounts:
        """What the cache has done."""
        cache, disk = self._cache, self._disk
        return PrefixCounts(
            cached_tokens=self._cached_tokens,
            hits=self._hits,
            misses=self._misses,
            idle_pages=self._pool.idle,
            snapshots=cache.snapshots,
            evicted_pages=cache.evicted_pages,
            evicted_snapshots=cache.evicted_snapshots,
            host_pages=self._host.used,
            idle_bytes=self._pool.idle * self._page_bytes,
            host_bytes=self._host.used * self._page_bytes + cache.snapshots * self._snapshot_bytes,
            demoted_pages=cache.demoted_pages,
            promoted_pages=self._promoted,
            files=0 if disk is None else disk.files,
            file_bytes=0 if disk is None else disk.file_bytes,
            file_hits=0 if disk is None else disk.hits,
        )

    def find(self, sequence: Sequence) -> None:
        """Let a sequence that is about to start share the pages of its longest known prefix.

        At least one token is left to compute, since its row gives the next token, unless the
        logits after the last token are kept.
        """
        if self._may_begin_later(sequence):
            self._share(sequence)
            if self._disk is not None:
                self._disk.find(sequence)
        if self._takes_snapshots(sequence):
            sequence.stops = self._stops(sequence)
            last = (sequence.cached, *sequence.stops)[-1]
            length = len(sequence.request.prompt)
            sequence.keeps_logits = not self._exact and length - last >= self._page_size

    def waits(self, sequence: Sequence, running: SequenceOf[Sequence]) -> bool:
        """Whether a sequence had better start later: its prefix is being read, or computed.

        It waits for another prompt if that saves at least a page besides the prefix that it has.
        """
        if not self._may_begin_later(sequence):
            return False
        if sequence.loading is not None and not sequence.loading.collected:
            return True
        least = sequence.cached + self._page_size
        return any(
            other.request.cache_key == sequence.request.cache_key
            and other.first_token_at is None
            and self._usable_later(sequence, other, least) >= least
            for other in running
        )

    def leave(self, sequence: Sequence) -> None:
        """Undo `find` for a sequence that cannot start yet."""
        self._release(sequence)
        self._pool.give_back(sequence.pages)
        sequence.pages, sequence.cached = [], 0

    def start(self, sequence: Sequence) -> None:
        """Copy what a sequence needs to begin after its prefix, before its first step.

        It has its state slot and the pages of that step.
        """
        if sequence.reused is None:
            sequence.reused = sequence.cached
            self._count(sequence)
        sequence.last_saved = sequence.cached
        if (found := sequence.prefix) is None:
            return
        own = iter(sequence.pages[len(found.pages) :])
        for spot, page in zip(found.hosted, own, strict=False):
            self._mover.load_page(spot.host, page)
            self._cache.promote(spot, page)
        self._promoted += len(found.hosted)
        if (taken := found.snapshot) is not None:
            if (tail := taken.tail_spot) is not None:
                page = sequence.pages[len(found.pages) + len(found.hosted)]
                if tail.page >= 0:
                    self._mover.copy_page(tail.page, page)
                else:
                    self._mover.load_page(tail.host, page)
            self._mover.load_state(taken.slot, sequence.state_slot, taken.position)
        self._release(sequence)

    def rows(self, sequence: Sequence, rows: int) -> int:
        """Return how many of a prompt's next `rows` tokens a step takes: up to the next cut.

        Where steps must not depend on what is cached, tokens after the prompt, which a preempted
        answer has, are computed one by one, as they were before.
        """
        if self._exact and sequence.cached >= len(sequence.request.prompt):
            return min(rows, 1)
        if self._exact:
            cuts = (*self._cuts(sequence), len(sequence.request.prompt))
            return min(rows, next(x for x in cuts if x > sequence.cached) - sequence.cached)
        if not self._takes_snapshots(sequence):
            return rows
        cut = next((x for x in self._cuts(sequence) if x > sequence.cached), len(sequence.tokens))
        return min(rows, cut - sequence.cached)

    def advance(self, sequence: Sequence) -> None:
        """Take a snapshot of a sequence whose launched step ends at a cut, or with the prompt."""
        if not self._takes_snapshots(sequence):
            return
        position, prompt = sequence.cached, len(sequence.request.prompt)
        if position == prompt and not self._exact:
            self._save(sequence, passing=False)
        elif position in sequence.stops:
            self._save(sequence, passing=True)

    def keep_logits(self, sequence: Sequence, logits: LogitRow) -> None:
        """Keep the logits after a sequence's prompt with the snapshot that was taken there."""
        for saved in sequence.saved:
            if saved.position == len(sequence.request.prompt):
                self._logits[saved.slot] = torch.from_numpy(logits)
                saved.has_logits = True

    def logits_after(self, prefix: Prefix) -> LogitRow:
        """Return the kept logits after a prefix that is a whole prompt."""
        assert prefix.snapshot is not None
        assert prefix.snapshot.has_logits
        kept: LogitRow = self._logits[prefix.snapshot.slot].numpy()
        return kept

    def confirm(self, sequence: Sequence) -> None:
        """Keep the prompt of a sequence whose first token is read."""
        if self.works and sequence.request.cache_key is not None:
            self._keep(sequence, len(sequence.request.prompt))

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Keep what a sequence that stops has computed, if its steps have succeeded.

        It has its pages and its state slot for the last time.
        """
        self._release(sequence)
        key = sequence.request.cache_key
        if not (keep and self.works) or key is None:
            for saved in sequence.saved:
                self._cache.give_back_snapshot_slot(saved.slot)
            sequence.saved.clear()
            return
        known = min(sequence.cached, len(sequence.tokens) - sequence.unread)
        if known == sequence.cached and self._takes_snapshots(sequence) and not self._exact:
            self._save(sequence, passing=False)
        self._keep(sequence, known)
        if sequence.picks is not None:
            ends = len(sequence.request.prompt), known
            self._cache.keep_picks(key, sequence.tokens[:known], ends, sequence.picks)
        if self._disk is not None:
            tokens = sequence.tokens[: self._keepable(sequence, known)]
            self._disk.store(key, tokens, len(sequence.pages))

    @property
    def uses_files(self) -> bool:
        """Whether files are being read for requests, or written from pages that are held."""
        return self._disk is not None and self._disk.busy

    @property
    def has_news(self) -> bool:
        """Whether there is something to collect."""
        return self._disk is not None and self._disk.has_news

    def collect(self) -> None:
        """Take what the thread of the prefix files has read, and give back what it has written."""
        if self._disk is not None:
            self._disk.collect()

    def close(self) -> None:
        """Write what is still to be written to files."""
        if self._disk is not None:
            self._disk.close()

    def entries(self, owner: str) -> PrefixEntries:
        """Return what is kept of an owner's prompts."""
        return PrefixEntries(
            kept=[entry for entry in self._cache.entries() if owner_of(entry.key) == owner],
            page_bytes=self._page_bytes,
            stored=[] if self._disk is None else self._disk.entries(owner),
        )

    def forget(self, owner: str) -> int:
        """Forget an owner's prompts, in memory and in files; return how many pages that were."""
        if self._disk is not None:
            self._disk.forget(owner)
        return self._cache.forget(lambda key: owner_of(key) == owner)

    def clear(self) -> None:
        """Forget all prefixes in memory; the caches of the stages are empty."""
        if self._disk is not None:
            self._disk.give_up()
        self._cache.clear()

    def need_pages(self) -> None:
        """Let go of pages that are held for files: a sequence needs them."""
        if self._disk is not None:
            self._disk.give_up()

    def _share(self, sequence: Sequence) -> None:
        assert sequence.request.cache_key is not None
        key, tokens = sequence.request.cache_key, sequence.tokens
        known = len(tokens) - sequence.unread
        found = self._cache.find(key, tokens[:known], min(known, len(tokens) - 1))
        if found is not None and (end := self._keepable(sequence, found.tokens)) < found.tokens:
            self._cache.release(found)
            found = self._cache.find(key, tokens[:end], end)
        if found is not None:
            self._pool.share(found.pages)
            sequence.prefix, sequence.pages = found, list(found.pages)
            sequence.cached = found.tokens

    def _release(self, sequence: Sequence) -> None:
        """Let go of the prefix that a sequence was to begin after."""
        if sequence.prefix is not None:
            self._cache.release(sequence.prefix)
            sequence.prefix = None

    def _usable_later(self, sequence: Sequence, other: Sequence, least: int) -> int:
        """Return how many tokens a sequence need not compute once the prompt of another is kept."""
        tokens, prompt = sequence.tokens, other.request.prompt
        most = min(len(tokens) - (0 if other.keeps_logits else 1), len(prompt))
        if most < least or tuple(tokens[:least]) != prompt[:least]:
            return 0
        shared = common_length(tokens, prompt, most)
        if not self._needs_snapshots:
            return self._keepable(other, shared // self._page_size * self._page_size)
        ends = other.stops if self._exact else (*other.stops, len(prompt))
        return max((end for end in ends if end <= shared), default=0)

    def _keepable(self, sequence: Sequence, end: int) -> int:
        """Return how many of a sequence's first `end` tokens a later request may begin after."""
        if not self._exact:
            return end
        size = 1 if self._needs_snapshots else self._page_size
        cuts = (cut for cut in self._cuts(sequence) if cut <= end and cut % size == 0)
        return max(cuts, default=0)

    def _count(self, sequence: Sequence) -> None:
        if sequence.cached:
            self._hits += 1
            self._cached_tokens += sequence.cached
        elif self._may_begin_later(sequence):
            self._misses += 1

    def _may_begin_later(self, sequence: Sequence) -> bool:
        """Whether the first rows of a sequence are not needed for anything but the cache."""
        request = sequence.request
        scores = request.params.prompt_logprobs and len(request.prompt_logprobs) < len(
            request.prompt
        )
        wants_rows = scores or request.pooling is not None
        return self.works and request.cache_key is not None and not wants_rows

    def _takes_snapshots(self, sequence: Sequence) -> bool:
        return self._needs_snapshots and self.works and sequence.request.cache_key is not None

    def _save(self, sequence: Sequence, *, passing: bool) -> None:
        """Take a snapshot of a sequence, unless little was computed since the last one."""
        if sequence.cached - sequence.last_saved < self._page_size:
            return
        slot = self._cache.take_snapshot_slot()
        if slot is None:
            return
        self._mover.save_state(sequence.state_slot, slot, sequence.cached)
        sequence.saved.append(UnconfirmedSnapshot(slot, sequence.cached, passing))
        sequence.last_saved = sequence.cached

    def _keep(self, sequence: Sequence, end: int) -> None:
        """Keep the first `end` tokens of a sequence, and the snapshots that were taken of it."""
        key = sequence.request.cache_key
        assert key is not None
        tokens, pages = sequence.tokens, sequence.pages
        self._cache.keep(key, tokens[: self._keepable(sequence, end)], pages)
        for saved in sequence.saved:
            self._cache.keep_snapshot(
                key,
                tokens[: saved.position],
                pages,
                saved.slot,
                passing=saved.passing,
                has_logits=saved.has_logits,
            )
        sequence.saved.clear()

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the cuts of a sequence's prompt at which snapshots are taken."""
        prompt, last = len(sequence.request.prompt), sequence.cached
        apart, stops = self._page_size, []
        for cut in self._cuts(sequence):
            if last + apart <= cut < prompt:
                stops.append(cut)
                last, apart = cut, max(self._chunk, prompt // PASSING_SNAPSHOTS, self._page_size)
        return tuple(stops)

    def _cuts(self, sequence: Sequence) -> tuple[int, ...]:
        if sequence.cuts is None:
            request = sequence.request
            # Without snapshots a prefix ends with a full page, and so should a step.
            whole = self._needs_snapshots or self._chunk < self._page_size
            chunk = self._chunk if whole else self._chunk // self._page_size * self._page_size
            ends = request.stop_ids if self._needs_snapshots else frozenset[int]()
            sequence.cuts = tuple(prompt_cuts(request.prompt, chunk, ends))
        return sequence.cuts


def prompt_cuts(tokens: SequenceOf[int], chunk: int, ends: frozenset[int]) -> list[int]:
    """Return where a prompt may be cut: a chunk after the last cut, or sooner after a message.

    `ends` are the tokens that end a message. Messages shorter than half a chunk are not cut off.
    """
    cuts, last = [], 0
    for position, token in enumerate(tokens, start=1):
        length = position - last
        if length == chunk or (2 * length >= chunk and token in ends):
            cuts.append(position)
            last = position
    return cuts
