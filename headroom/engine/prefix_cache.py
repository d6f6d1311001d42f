"""PrefixCache: which prefixes of earlier requests are kept, on the devices and in host memory."""

import heapq
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from headroom.engine.pages import PagePool

log = logging.getLogger(__name__)

TELL_S = 10.0  # pages that are given up are logged together, at most once in so long

Tokens = tuple[int, ...]
Used = tuple[float, int]  # when something was last used: by time.monotonic(), and in which order


class HostPages:
    """Room in host memory for pages that had to leave the devices; the stages have its bytes."""

    def __init__(self, count: int, save: Callable[[int, int], None]) -> None:
        self.total = count
        self.save = save  # copies a page of the devices to a slot
        self.free = list(range(count - 1, -1, -1))
        self.closed = False  # pages that leave the devices are given up

    @property
    def used(self) -> int:
        """The slots that hold pages."""
        return self.total - len(self.free)


@dataclass(slots=True, eq=False)
class Spot:
    """Where the keys and values of one page of known tokens are.

    They are on the devices or in host memory. They are in both while sequences are about to copy
    them to pages of their own.
    """

    page: int  # on the devices; -1: it is not there
    host: int = -1  # its slot in host memory; -1: it is not there
    holds: int = 0  # sequences that are about to copy the slot
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Snapshot:
    """What recurrent layers and layers with a window hold after a prefix, which no page holds.

    The prefix ends `tail` tokens after the last full page. Their keys and values are in the first
    rows of the page at `tail_spot`.
    """

    slot: int  # where each stage keeps its part
    position: int  # tokens of the prefix
    node: "_Page"  # the last full page of the prefix
    tail: Tokens
    tail_spot: Spot | None  # None: the prefix ends with a full page
    has_logits: bool  # those after the last token are kept, so that the next one can be drawn
    passing: bool  # saved on the way through a long prompt, not where a prompt or an answer ended
    used: Used
    holds: int = 0  # files that it is being written to; it is not given up meanwhile
    dropped: bool = False  # forgotten while it was held


@dataclass(slots=True, eq=False, kw_only=True)
class _Page(Spot):
    """A full page of known tokens after those of its parent; a root stands before all pages.

    If it is on the devices, so are all pages before it.
    """

    parent: "_Page | None" = None
    tokens: Tokens = ()
    end: int = 0  # tokens up to the end of the page
    used: Used = (0.0, 0)
    children: "dict[Tokens, _Page]" = field(default_factory=dict)
    snapshots: dict[Tokens, Snapshot] = field(default_factory=dict)  # by their tail
    key: str = ""  # of a root: the key of its prefixes
    picks: torch.Tensor | None = None  # of experts, in the conversation whose last page this was

    @property
    def ends_devices(self) -> bool:
        """Whether no page after it is on the devices."""
        return all(child.page < 0 for child in self.children.values())


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """What is told of a prefix."""

    key: str
    tokens: int
    pages: int
    snapshots: int  # of the prefix and its beginnings
    idle_s: float  # since it was last used
    host_pages: int = 0  # those of its pages that are in host memory


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The longest known prefix of a prompt."""

    tokens: int
    pages: list[int]  # its full pages on the devices
    hosted: list[Spot]  # the full pages after these, which are in host memory
    snapshot: Snapshot | None = None  # None: the model's layers have pages alone
    picks: torch.Tensor | None = None  # of experts, in the conversation that goes on; float32


class PrefixCache:
    """Finds the longest known prefix of a prompt, and gives up what was not used for longest.

    Prefixes with different keys have nothing in common. With `snapshot_slots` of None all layers
    keep their tokens in pages, so a prefix may end with any full page. Otherwise it must end where
    a snapshot was taken. Pages that have to leave the devices move to host memory while there is
    room.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        snapshot_slots: int | None = None,
        host: HostPages | None = None,
    ) -> None:
        self._pool, self._page_size = pool, page_size
        self._host = HostPages(0, lambda page, slot: None) if host is None else host
        self.needs_snapshots = snapshot_slots is not None
        self._free_slots = list(range((snapshot_slots or 0) - 1, -1, -1))
        self._snapshot_slots = len(self._free_slots)
        self._snapshots_closed = False  # no snapshots are taken
        self._roots: dict[str, _Page] = {}
        self._snapshots: list[Snapshot] = []
        self._order = count()  # breaks ties of times and in the heap
        # Pages by last use that may leave the devices, and host memory. Some entries are stale.
        self._heap: list[tuple[Used, int, _Page]] = []
        self._host_heap: list[tuple[Used, int, _Page]] = []
        self.evicted_pages = 0
        self.demoted_pages = 0  # moved to host memory
        self._told_at, self._told = -TELL_S, (0, 0)
        self.evicted_snapshots = 0
        pool.evict = self._evict_pages

    @property
    def snapshots(self) -> int:
        """How many snapshots there are."""
        return len(self._snapshots)

    def find(self, key: str, tokens: Sequence[int], most: int) -> Prefix | None:
        """Return the longest known prefix of at most `most` tokens; None: there is none.

        A snapshot that has logits may end with the last token, even beyond `most`.
        Its pages count as used now. The caller shares them before it takes other pages, and calls
        `release` when it has copied what is in host memory, or gives up.
        """
        path = list(self._walk(key, tokens, len(tokens) if self.needs_snapshots else most))
        if not path:
            return None
        snapshot = self._deepest_snapshot(path, tokens, most) if self.needs_snapshots else None
        if self.needs_snapshots and snapshot is None:
            return None
        last = path[-1] if snapshot is None else snapshot.node
        if snapshot is None and not last.end:
            return None
        now = self._now()
        if snapshot is not None:
            snapshot.used = now
        nodes = path[1 : path.index(last) + 1]
        for node in nodes:
            node.used = now
        self._offer(last)
        hosted: list[Spot] = [node for node in nodes if node.page < 0]
        tail = None if snapshot is None else snapshot.tail_spot
        for spot in hosted if tail is None else (*hosted, tail):
            spot.holds += 1
        length = last.end if snapshot is None else snapshot.position
        pages = [node.page for node in nodes if node.page >= 0]
        return Prefix(length, pages, hosted, snapshot, path[-1].picks)

    def promote(self, spot: Spot, page: int) -> None:
        """Keep the page of a sequence to which a page in host memory was copied."""
        if not spot.dropped and spot.page < 0:
            spot.page = page
            self._pool.keep(page)

    def release(self, prefix: Prefix) -> None:
        """Let go of what `find` has held; pages that are on the devices again leave host memory."""
        tail = None if prefix.snapshot is None else prefix.snapshot.tail_spot
        for spot in prefix.hosted if tail is None else (*prefix.hosted, tail):
            spot.holds -= 1
            self._free_host(spot)
            if isinstance(spot, _Page) and not spot.dropped:
                self._offer(spot)

    def keep(self, key: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the full pages of a prefix, which a sequence has filled and still uses."""
        if len(tokens) >= self._page_size:
            self._add(key, tokens, pages)

    def keep_picks(
        self, key: str, tokens: Sequence[int], ends: Sequence[int], picks: torch.Tensor
    ) -> None:
        """Keep how often each expert was picked with a conversation's last pages at some ends.

        What was kept with its earlier pages is forgotten: there is one table for a conversation.
        """
        path = list(self._walk(key, tokens, len(tokens)))[1:]
        for node in path:
            node.picks = None
        for end in ends:
            if known := [node for node in path if node.end <= end]:
                known[-1].picks = picks

    def picks_of(self, key: str, tokens: Sequence[int]) -> torch.Tensor | None:
        """Return the picks that are kept with the last known page of some tokens."""
        path = list(self._walk(key, tokens, len(tokens)))
        return path[-1].picks if path else None

    def snapshots_of(self, key: str, tokens: Sequence[int]) -> list[Snapshot]:
        """Return the snapshots of the beginnings of some tokens, the longest first."""
        found = [
            snapshot
            for node in self._walk(key, tokens, len(tokens))
            for tail, snapshot in node.snapshots.items()
            if tuple(tokens[node.end : snapshot.position]) == tail
        ]
        return sorted(found, key=lambda snapshot: -snapshot.position)

    def known_pages(self, key: str, tokens: Sequence[int]) -> list[int]:
        """Return the pages that the devices keep of a prefix, from its beginning."""
        nodes = self._walk(key, tokens, len(tokens))
        return [node.page for node in nodes if node.parent and node.page >= 0]

    def let_go(self, snapshot: Snapshot) -> None:
        """Hold a snapshot once less."""
        snapshot.holds -= 1
        if snapshot.dropped and not snapshot.holds:
            self._free_slots.append(snapshot.slot)

    def take_snapshot_slot(self) -> int | None:
        """Return a slot for a snapshot that is about to be taken; None if there is none."""
        if self._snapshots_closed:
            return None
        if not self._free_slots and (oldest := self._least_wanted()) is not None:
            self._drop_snapshot(oldest)
        return self._free_slots.pop() if self._free_slots else None

    def give_back_snapshot_slot(self, slot: int) -> None:
        """Take a slot back whose snapshot does not become a prefix."""
        self._free_slots.append(slot)

    def keep_snapshot(
        self,
        key: str,
        tokens: Sequence[int],
        pages: Sequence[int],
        slot: int,
        *,
        passing: bool,
        has_logits: bool = False,
    ) -> None:
        """Keep a prefix with the state after its last token, and the pages of the sequence."""
        node = self._add(key, tokens, pages)
        tail = tuple(tokens[node.end :])
        known = node.snapshots.get(tail)
        if known is not None and (known.has_logits or not has_logits):
            known.used = self._now()
            self.give_back_snapshot_slot(slot)
            return
        if known is not None:
            self._drop_snapshot(known)
        spot = Spot(pages[node.end // self._page_size]) if tail else None
        if spot is not None:
            self._pool.keep(spot.page)
        now = self._now()
        snapshot = Snapshot(slot, len(tokens), node, tail, spot, has_logits, passing, now)
        node.snapshots[tail] = snapshot
        self._snapshots.append(snapshot)

    def entries(self) -> "Iterator[KeptPrefix]":
        """Yield every prefix that is no other one's beginning."""
        now = time.monotonic()
        for key, root in self._roots.items():
            for node in (root, *_below(root)):
                tails = [x for x in node.snapshots.values() if x.tail]
                if node.children and not tails:
                    continue
                longest = max([node.end, *(x.position for x in tails)])
                used = max([node.used[0], *(x.used[0] for x in tails)])
                above = list(_upwards(node))
                spots = [*above[:-1], *(x.tail_spot for x in tails if x.tail_spot is not None)]
                yield KeptPrefix(
                    key,
                    longest,
                    len(spots),
                    snapshots=sum(len(page.snapshots) for page in above),
                    idle_s=now - used,
                    host_pages=sum(spot.page < 0 for spot in spots),
                )

    def close_host(self, *, snapshots: bool) -> bool:
        """Forget what is in host memory, pages or snapshots, and take no more until `open_host`.

        Return whether nothing uses this memory any more. Otherwise call it again after some steps.
        """
        if snapshots:
            self._snapshots_closed = True
            for snapshot in [one for one in self._snapshots if not one.holds]:
                self._drop_snapshot(snapshot)
            return len(self._free_slots) == self._snapshot_slots
        self._host.closed = True
        for root in list(self._roots.values()):
            nodes = (root, *_below(root))
            for snapshot in [x for node in nodes for x in node.snapshots.values()]:
                if snapshot.tail_spot is not None and snapshot.tail_spot.page < 0:
                    self._drop_snapshot(snapshot)
            for node in nodes:
                if node.parent is not None and node.page < 0 and not node.dropped:
                    self._drop_below(node)
        return not self._host.used

    def open_host(self) -> None:
        """Take pages and snapshots into host memory again."""
        self._host.closed = self._snapshots_closed = False

    def clear(self) -> None:
        """Forget all prefixes."""
        self.forget(lambda key: True)
        self._heap.clear()
        self._host_heap.clear()

    def forget(self, wanted: Callable[[str], bool]) -> int:
        """Forget the prefixes of some keys; return how many pages were kept of them."""
        pages = 0
        for key in [key for key in self._roots if wanted(key)]:
            root = self._roots[key]
            for node in (root, *_below(root)):
                for snapshot in list(node.snapshots.values()):
                    self._drop_snapshot(snapshot)
            for node in list(_below(root)):
                self._leave(node)
                pages += 1
            self._roots.pop(key, None)
        return pages

    def _now(self) -> Used:
        return time.monotonic(), next(self._order)

    def _walk(self, key: str, tokens: Sequence[int], most: int) -> "Iterator[_Page]":
        """Yield the root and the known full pages within the first `most` tokens."""
        node = self._roots.get(key)
        while node is not None:
            yield node
            end = node.end + self._page_size
            if end > most:
                return
            node = node.children.get(tuple(tokens[node.end : end]))

    def _deepest_snapshot(
        self, path: "Sequence[_Page]", tokens: Sequence[int], most: int
    ) -> Snapshot | None:
        for node in reversed(path):
            fitting = [
                snapshot
                for tail, snapshot in node.snapshots.items()
                if (snapshot.position <= most or snapshot.has_logits)
                and tuple(tokens[node.end : snapshot.position]) == tail
            ]
            if fitting:
                return max(fitting, key=lambda snapshot: snapshot.position)
        return None

    def _add(self, key: str, tokens: Sequence[int], pages: Sequence[int]) -> "_Page":
        """Make nodes of the full pages of a prefix; return the last one."""
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = _Page(page=-1, key=key)
        now, size = self._now(), self._page_size
        for number in range(len(tokens) // size):
            own = tuple(tokens[number * size : (number + 1) * size])
            child = node.children.get(own)
            if child is None:
                end = (number + 1) * size
                child = _Page(page=pages[number], parent=node, tokens=own, end=end)
                node.children[own] = child
                self._pool.keep(child.page)
            elif child.page < 0:  # computed again, by a sequence that did not begin after it
                self.promote(child, pages[number])
                self._free_host(child)
            child.used = now
            node = child
        self._offer(node)
        return node

    def _offer(self, node: "_Page") -> None:
        """Let a page leave the devices or host memory, if no page after it is there, too."""
        if node.parent is None:
            return
        if node.page >= 0 and node.ends_devices:
            heapq.heappush(self._heap, (node.used, next(self._order), node))
        elif node.page < 0 and not node.children:
            heapq.heappush(self._host_heap, (node.used, next(self._order), node))

    def _evict_pages(self, wanted: int) -> None:
        """Make `wanted` idle pages free, those first that were not used for longest."""
        free = self._pool.free - self._pool.idle
        goal = free + wanted
        while self._pool.free - self._pool.idle < goal and self._pool.idle:
            node = self._pop_leaf()
            if node is not None:
                self._demote(node)
            elif (inner := self._oldest_unused()) is not None:
                self._drop_below(inner)
            elif (oldest := self._oldest_tail()) is not None:  # pages after full ones are left
                self._demote_tail(oldest)
            else:
                break
        self._tell_pressure(wanted)

    def _tell_pressure(self, wanted: int) -> None:
        """Log what was given up since the last time."""
        now = time.monotonic()
        if now - self._told_at < TELL_S:
            return
        done = self.evicted_pages, self.demoted_pages
        log.info(
            "pressure: %d more pages needed: prefixes gave up %d and moved %d to host memory "
            "(%d of %d used there); %d of %d pages are free now",
            *(wanted, done[0] - self._told[0], done[1] - self._told[1]),
            *(self._host.used, self._host.total, self._pool.free, self._pool.total),
        )
        self._told_at, self._told = now, done

    def _demote(self, node: "_Page") -> None:
        """Move a page to host memory, after the pages that follow it; forget it without room."""
        for snapshot in list(node.snapshots.values()):
            if snapshot.tail_spot is not None and snapshot.tail_spot.page >= 0:
                self._demote_tail(snapshot)
        if self._move_to_host(node):
            self._offer(node)
            if node.parent is not None:
                self._offer(node.parent)
        elif not node.dropped:
            self._drop_below(node)

    def _demote_tail(self, snapshot: Snapshot) -> None:
        assert snapshot.tail_spot is not None
        if not self._move_to_host(snapshot.tail_spot) and not snapshot.dropped:
            self._drop_snapshot(snapshot)

    def _move_to_host(self, spot: Spot) -> bool:
        """Copy a page to host memory and give up its place on the devices; False without room."""
        if spot.host < 0:
            slot = self._take_host_slot()
            if slot is None or spot.dropped:
                if slot is not None:
                    self._host.free.append(slot)
                return False
            spot.host = slot
            self._host.save(spot.page, slot)
        self._pool.drop(spot.page)
        spot.page = -1
        self.demoted_pages += 1
        return True

    def _take_host_slot(self) -> int | None:
        """Return a free slot of host memory; the page that was not used for longest makes room."""
        if self._host.closed:
            return None
        while not self._host.free and self._host_heap:
            used, _, node = heapq.heappop(self._host_heap)
            gone = node.dropped or node.page >= 0 or bool(node.children)
            if not gone and node.used == used and not node.holds:
                self._drop_page(node)
        return self._host.free.pop() if self._host.free else None

    def _free_host(self, spot: Spot) -> None:
        """Free the slot of a page that is on the devices or forgotten, if nobody needs it."""
        if spot.host >= 0 and not spot.holds and (spot.page >= 0 or spot.dropped):
            self._host.free.append(spot.host)
            spot.host = -1

    def _leave(self, spot: Spot) -> None:
        """Give up a page wherever it is."""
        spot.dropped = True
        if spot.page >= 0:
            self._pool.drop(spot.page)
        self._free_host(spot)

    def _pop_leaf(self) -> "_Page | None":
        """Return the unused last page on the devices that was not used for longest; None: none."""
        for _ in range(2):
            while self._heap:
                used, _, node = heapq.heappop(self._heap)
                current = not node.dropped and node.page >= 0 and node.ends_devices
                if current and node.used == used and not self._pool.is_used(node.page):
                    return node
            # Pages that were in use when their turn came are no longer in the heap.
            for root in self._roots.values():
                for node in _below(root):
                    if node.page >= 0 and not self._pool.is_used(node.page):
                        self._offer(node)
        return None

    def _oldest_unused(self) -> "_Page | None":
        """Return the page that was not used for longest and that no sequence uses; None: none.

        Pages after it may be in use: a sequence that has computed known tokens once more uses its
        own pages for these, and the cache keeps the older ones.
        """
        unused = [
            node
            for root in self._roots.values()
            for node in _below(root)
            if node.page >= 0 and not self._pool.is_used(node.page)
        ]
        return min(unused, key=lambda node: node.used, default=None)

    def _drop_below(self, node: "_Page") -> None:
        """Forget a page and all pages after it; sequences go on to use those that they use."""
        for page in reversed([node, *_below(node)]):  # each after those that follow it
            self._drop_page(page)

    def _drop_page(self, node: "_Page") -> None:
        for snapshot in list(node.snapshots.values()):
            self._drop_snapshot(snapshot)
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        self._leave(node)
        self.evicted_pages += 1
        self._offer(parent)
        self._drop_empty_root(parent)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        del snapshot.node.snapshots[snapshot.tail]
        if snapshot.tail_spot is not None:
            self._leave(snapshot.tail_spot)
        snapshot.dropped = True
        if not snapshot.holds:
            self._free_slots.append(snapshot.slot)
        self.evicted_snapshots += 1
        self._drop_empty_root(snapshot.node)

    def _drop_empty_root(self, node: "_Page") -> None:
        if node.parent is None and not node.children and not node.snapshots:
            self._roots.pop(node.key, None)

    def _oldest_tail(self) -> Snapshot | None:
        """Return the oldest snapshot whose last tokens are in an unused page on the devices."""
        unused = [
            snapshot
            for snapshot in self._snapshots
            if snapshot.tail_spot is not None
            and snapshot.tail_spot.page >= 0
            and not self._pool.is_used(snapshot.tail_spot.page)
        ]
        return min(unused, key=lambda snapshot: snapshot.used, default=None)

    def _least_wanted(self) -> Snapshot | None:
        """Return the snapshot to give up: the oldest, or the oldest inner one of too many.

        Inner ones are those on the way through a prompt, and those that a longer one follows: most
        turns of a chat begin after its last answer, and a long chat must not push out all others.
        """
        free = [snapshot for snapshot in self._snapshots if not snapshot.holds]
        followed = self._followed()
        inner = [x for x in free if x.passing or id(x) in followed]
        those = inner if 2 * len(inner) > len(free) else free
        return min(those, key=lambda snapshot: snapshot.used, default=None)

    def _followed(self) -> set[int]:
        """Return the identities of the snapshots whose prefix is the beginning of another's."""
        found = set()
        for snapshot in self._snapshots:
            after = snapshot.tail  # the tokens that follow each page
            for node in _upwards(snapshot.node):
                for tail, other in node.snapshots.items():
                    if other is not snapshot and after[: len(tail)] == tail:
                        found.add(id(other))
                after = node.tokens
        return found


def _below(root: "_Page") -> "Iterator[_Page]":
    """Yield all pages after a root."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def _upwards(node: "_Page") -> "Iterator[_Page]":
    """Yield a page and those before it, the root last."""
    at: _Page | None = node
    while at is not None:
        yield at
        at = at.parent
