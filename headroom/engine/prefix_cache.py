"""PrefixCache: which prefixes of earlier requests the KV pages and snapshots still hold."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from headroom.engine.pages import PagePool

Tokens = tuple[int, ...]
Used = tuple[float, int]  # when something was last used: by time.monotonic(), and in which order


@dataclass(slots=True, eq=False)
class Snapshot:
    """What recurrent layers and layers with a window hold after a prefix, which no page holds.

    The prefix ends `tail` tokens after the last full page. Their keys and values are in the first
    rows of `tail_page`.
    """

    slot: int  # where each stage keeps its part
    position: int  # tokens of the prefix
    node: "_Page"  # the last full page of the prefix
    tail: Tokens
    tail_page: int | None  # None: the prefix ends with a full page
    has_logits: bool  # those after the last token are kept, so that the next one can be drawn
    passing: bool  # saved on the way through a long prompt, not where a prompt or an answer ended
    used: Used
    holds: int = 0  # files that it is being written to; it is not given up meanwhile
    dropped: bool = False  # forgotten while it was held


@dataclass(slots=True, eq=False)
class _Page:
    """A full page of known tokens after those of its parent; a root stands before all pages."""

    parent: "_Page | None"
    tokens: Tokens
    page: int  # -1 for a root
    end: int  # tokens up to the end of the page
    used: Used = (0.0, 0)
    children: "dict[Tokens, _Page]" = field(default_factory=dict)
    snapshots: dict[Tokens, Snapshot] = field(default_factory=dict)  # by their tail
    dropped: bool = False
    key: str = ""  # of a root: the key of its prefixes


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """What is told of a prefix."""

    key: str
    tokens: int
    pages: int
    snapshots: int  # of the prefix and its beginnings
    idle_s: float  # since it was last used


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The longest known prefix of a prompt."""

    tokens: int
    pages: list[int]  # its full pages
    snapshot: Snapshot | None = None  # None: the model's layers have pages alone


class PrefixCache:
    """Finds the longest known prefix of a prompt, and gives up what was not used for longest.

    Prefixes with different keys have nothing in common. With `snapshot_slots` of None all layers
    keep their tokens in pages, so a prefix may end with any full page. Otherwise it must end where
    a snapshot was taken.
    """

    def __init__(self, pool: PagePool, page_size: int, snapshot_slots: int | None = None) -> None:
        self._pool, self._page_size = pool, page_size
        self.needs_snapshots = snapshot_slots is not None
        self._free_slots = list(range((snapshot_slots or 0) - 1, -1, -1))
        self._roots: dict[str, _Page] = {}
        self._snapshots: list[Snapshot] = []
        self._order = count()  # breaks ties of times and in the heap
        self._heap: list[tuple[Used, int, _Page]] = []  # leaves by last use; some entries are stale
        self.evicted_pages = 0
        self.evicted_snapshots = 0
        pool.evict = self._evict_pages

    @property
    def snapshots(self) -> int:
        """How many snapshots there are."""
        return len(self._snapshots)

    def find(self, key: str, tokens: Sequence[int], most: int) -> Prefix | None:
        """Return the longest known prefix of at most `most` tokens; None: there is none.

        A snapshot that has logits may end with the last token, even beyond `most`.
        Its pages count as used now. The caller shares them before it takes other pages.
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
        pages = []
        for node in path[1 : path.index(last) + 1]:
            node.used = now
            pages.append(node.page)
        self._offer(last)
        return Prefix(last.end if snapshot is None else snapshot.position, pages, snapshot)

    def keep(self, key: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keep the full pages of a prefix, which a sequence has filled and still uses."""
        if len(tokens) >= self._page_size:
            self._add(key, tokens, pages)

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
        """Return the pages that are kept of a prefix, from its beginning."""
        return [node.page for node in self._walk(key, tokens, len(tokens)) if node.parent]

    def let_go(self, snapshot: Snapshot) -> None:
        """Hold a snapshot once less."""
        snapshot.holds -= 1
        if snapshot.dropped and not snapshot.holds:
            self._free_slots.append(snapshot.slot)

    def take_snapshot_slot(self) -> int | None:
        """Return a slot for a snapshot that is about to be taken; None if there is none."""
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
        tail_page = pages[node.end // self._page_size] if tail else None
        if tail_page is not None:
            self._pool.keep(tail_page)
        now = self._now()
        snapshot = Snapshot(slot, len(tokens), node, tail, tail_page, has_logits, passing, now)
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
                pages = node.end // self._page_size
                states = _snapshots_above(node)
                yield KeptPrefix(key, longest, pages + len(tails), states, now - used)

    def clear(self) -> None:
        """Forget all prefixes."""
        self.forget(lambda key: True)
        self._heap.clear()

    def forget(self, wanted: Callable[[str], bool]) -> int:
        """Forget the prefixes of some keys; return how many pages were kept of them."""
        pages = 0
        for key in [key for key in self._roots if wanted(key)]:
            root = self._roots[key]
            for node in (root, *_below(root)):
                for snapshot in list(node.snapshots.values()):
                    self._drop_snapshot(snapshot)
            for node in list(_below(root)):
                node.dropped = True
                self._pool.drop(node.page)
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
            node = self._roots[key] = _Page(None, (), -1, 0, key=key)
        now, size = self._now(), self._page_size
        for number in range(len(tokens) // size):
            own = tuple(tokens[number * size : (number + 1) * size])
            child = node.children.get(own)
            if child is None:
                child = _Page(node, own, pages[number], (number + 1) * size)
                node.children[own] = child
                self._pool.keep(child.page)
            child.used = now
            node = child
        self._offer(node)
        return node

    def _offer(self, node: "_Page") -> None:
        """Let a page be given up, when it has no children and is not used."""
        if node.parent is not None and not node.children:
            heapq.heappush(self._heap, (node.used, next(self._order), node))

    def _evict_pages(self, wanted: int) -> None:
        """Make `wanted` idle pages free, those first that were not used for longest."""
        free = self._pool.free - self._pool.idle
        goal = free + wanted
        while self._pool.free - self._pool.idle < goal and self._pool.idle:
            node = self._pop_leaf()
            if node is not None:
                self._drop_page(node)
            elif (inner := self._oldest_unused()) is not None:
                self._drop_below(inner)
            elif (oldest := self._least_wanted()) is not None:  # pages after full ones are left
                self._drop_snapshot(oldest)
            else:
                return

    def _pop_leaf(self) -> "_Page | None":
        """Return the unused page without children that was not used for longest; None: none."""
        for _ in range(2):
            while self._heap:
                used, _, node = heapq.heappop(self._heap)
                current = not node.dropped and not node.children and node.used == used
                if current and not self._pool.is_used(node.page):
                    return node
            # Pages that were in use when their turn came are no longer in the heap.
            for root in self._roots.values():
                for node in _below(root):
                    if not self._pool.is_used(node.page):
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
            if not self._pool.is_used(node.page)
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
        node.dropped = True
        del parent.children[node.tokens]
        self._pool.drop(node.page)
        self.evicted_pages += 1
        self._offer(parent)
        self._drop_empty_root(parent)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        del snapshot.node.snapshots[snapshot.tail]
        if snapshot.tail_page is not None:
            self._pool.drop(snapshot.tail_page)
        snapshot.dropped = True
        if not snapshot.holds:
            self._free_slots.append(snapshot.slot)
        self.evicted_snapshots += 1
        self._drop_empty_root(snapshot.node)

    def _drop_empty_root(self, node: "_Page") -> None:
        if node.parent is None and not node.children and not node.snapshots:
            self._roots.pop(node.key, None)

    def _least_wanted(self) -> Snapshot | None:
        """Return the snapshot to give up: the oldest, or the oldest passing one of too many."""
        free = [snapshot for snapshot in self._snapshots if not snapshot.holds]
        passing = [snapshot for snapshot in free if snapshot.passing]
        those = passing if 2 * len(passing) > len(free) else free
        return min(those, key=lambda snapshot: snapshot.used, default=None)


def _below(root: "_Page") -> "Iterator[_Page]":
    """Yield all pages after a root."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def _snapshots_above(node: "_Page") -> int:
    """Return how many snapshots a page and those before it have."""
    found, at = 0, node
    while True:
        found += len(at.snapshots)
        if at.parent is None:
            return found
        at = at.parent
