"""PrefixCache: the longest known prefix, shared pages, snapshots, and what is given up first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headroom.engine.pages import PagePool
from headroom.engine.prefix_cache import HostPages, PrefixCache

SIZE = 4  # tokens in a page


def fill(pool: PagePool, cache: PrefixCache, tokens: Sequence[int], key: str = "") -> list[int]:
    """Compute a prompt as a sequence would, keep it, and let the sequence end."""
    pages = pool.take(-(-len(tokens) // SIZE))
    cache.keep(key, tokens, pages)
    pool.give_back(pages)
    return pages


def test_the_longest_prefix_of_full_pages_is_found() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE)
    pages = fill(pool, cache, range(11))
    found = cache.find("", list(range(11)), 10)
    assert found is not None
    assert (found.tokens, found.pages) == (8, pages[:2])
    found = cache.find("", [*range(8), 9, 9, 9, 9], 11)
    assert found is not None
    assert (found.tokens, found.pages) == (8, pages[:2])
    found = cache.find("", [*range(5), 9, 9, 9, 9], 8)
    assert found is not None
    assert found.tokens == 4
    assert cache.find("", [9, *range(1, 8)], 8) is None


def test_at_most_as_many_tokens_are_found_as_are_asked_for() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE)
    fill(pool, cache, range(8))
    found = cache.find("", list(range(8)), 7)
    assert found is not None
    assert found.tokens == 4
    assert cache.find("", list(range(8)), 3) is None


def test_prefixes_of_other_keys_are_not_found() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE)
    fill(pool, cache, range(8), "one")
    assert cache.find("two", list(range(8)), 8) is None
    assert cache.find("one", list(range(8)), 8) is not None


def test_pages_of_a_known_prefix_are_kept_once() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE)
    first = fill(pool, cache, range(8))
    fill(pool, cache, range(12))
    found = cache.find("", list(range(12)), 12)
    assert found is not None
    assert found.pages[:2] == first
    assert pool.idle == 3
    assert pool.free == 10


def test_what_was_not_used_for_longest_is_given_up_first_from_its_end() -> None:
    cache = PrefixCache(pool := PagePool(4), SIZE)
    fill(pool, cache, [1] * 8)
    fill(pool, cache, [2] * 8)
    cache.find("", [1] * 8, 8)
    pool.take(1)
    found = cache.find("", [2] * 8, 8)
    assert found is not None
    assert found.tokens == 4
    found = cache.find("", [1] * 8, 8)
    assert found is not None
    assert found.tokens == 8
    pool.take(3)
    assert cache.find("", [1] * 8, 8) is None
    assert cache.evicted_pages == 4
    assert pool.free == 0


def test_pages_in_use_are_never_given_up() -> None:
    cache = PrefixCache(pool := PagePool(3), SIZE)
    fill(pool, cache, [1] * 8)
    found = cache.find("", [1] * 8, 8)
    assert found is not None
    pool.share(found.pages)
    assert pool.free == 1
    taken = pool.take(1)
    assert not set(taken) & set(found.pages)
    with pytest.raises(AssertionError):
        pool.take(1)
    pool.give_back(found.pages)
    assert pool.free == 2


def snap(
    pool: PagePool, cache: PrefixCache, tokens: Sequence[int], *, passing: bool = False
) -> None:
    pages = pool.take(-(-len(tokens) // SIZE))
    slot = cache.take_snapshot_slot()
    assert slot is not None
    cache.keep_snapshot("", tokens, pages, slot, passing=passing)
    pool.give_back(pages)


def test_with_snapshots_a_prefix_ends_where_one_was_taken() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE, 4)
    fill(pool, cache, range(12))
    assert cache.find("", list(range(12)), 12) is None
    snap(pool, cache, range(6))
    found = cache.find("", list(range(12)), 12)
    assert found is not None
    assert found.tokens == 6
    assert len(found.pages) == 1
    assert found.snapshot is not None
    assert found.snapshot.tail == (4, 5)
    assert cache.find("", [0, 1, 2, 3, 4, 9, 9], 7) is None
    assert cache.find("", list(range(6)), 5) is None


def test_a_snapshot_within_the_first_page_is_found() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE, 4)
    snap(pool, cache, [7, 8])
    found = cache.find("", [7, 8, 9], 2)
    assert found is not None
    assert (found.tokens, found.pages) == (2, [])


def test_the_oldest_snapshot_makes_room_and_passing_ones_take_half_at_most() -> None:
    cache = PrefixCache(pool := PagePool(20), SIZE, 4)
    for number in range(4):
        snap(pool, cache, [number] * 6, passing=number > 0)
    snap(pool, cache, [9] * 6)
    assert cache.find("", [0] * 7, 7) is not None
    assert cache.find("", [1] * 7, 7) is None  # the oldest of three passing ones
    snap(pool, cache, [8] * 6)
    assert cache.find("", [2] * 7, 7) is None or cache.find("", [0] * 7, 7) is None
    assert cache.snapshots == 4
    assert cache.evicted_snapshots == 2


def test_a_long_chat_does_not_push_out_the_end_of_another() -> None:
    cache = PrefixCache(pool := PagePool(40), SIZE, 5)
    snap(pool, cache, [9, 9, 9, 9, 9])  # the oldest
    for length in (5, 9, 10, 14, 18, 22):  # six turns of one chat
        snap(pool, cache, range(length))
    assert cache.snapshots == 5
    for tokens in ([9, 9, 9, 9, 9, 1], [*range(22), 1], [*range(18), 1]):
        found = cache.find("", tokens, len(tokens) - 1)
        assert found is not None
        assert found.tokens == len(tokens) - 1
        cache.release(found)
    found = cache.find("", [*range(9), 99], 9)
    assert found is None


def test_a_page_that_is_given_up_takes_its_snapshots_along() -> None:
    cache = PrefixCache(pool := PagePool(2), SIZE, 2)
    snap(pool, cache, range(6))
    assert pool.free == 2
    pool.take(2)
    assert cache.snapshots == 0
    assert cache.find("", list(range(8)), 8) is None


def test_pages_that_leave_the_devices_move_to_host_memory_and_the_oldest_are_given_up() -> None:
    copies: list[tuple[int, int]] = []
    host = HostPages(3, lambda page, slot: copies.append((page, slot)))
    cache = PrefixCache(pool := PagePool(4), SIZE, host=host)
    first = fill(pool, cache, range(8))
    fill(pool, cache, range(100, 108))
    pool.give_back(pool.take(2))  # takes the places of the first prefix, from its end
    assert [page for page, _ in copies] == first[::-1]
    found = cache.find("", list(range(9)), 8)
    assert found is not None
    assert (found.tokens, found.pages) == (8, [])
    assert [spot.host for spot in found.hosted] == [slot for _, slot in copies[::-1]]
    pool.give_back(pool.take(4))  # two more move, one after the other; slots that are held stay
    assert (len(copies), cache.evicted_pages) == (4, 1)
    pages = pool.take(2)
    for spot, page in zip(found.hosted, pages, strict=True):
        cache.promote(spot, page)
    cache.release(found)
    pool.give_back(pages)
    assert (host.used, pool.idle) == (1, 2)
    found = cache.find("", list(range(9)), 8)
    assert found is not None
    assert (found.pages, found.hosted) == (pages, [])


def test_picks_are_found_by_the_next_turn_and_by_nothing_that_branches_off_before() -> None:
    cache = PrefixCache(pool := PagePool(10), SIZE)
    fill(pool, cache, range(14))
    cache.keep_picks("", range(14), [6, 14], picks := torch.ones(2, 3))
    assert cache.picks_of("", range(6)) is picks
    assert cache.picks_of("", range(13)) is picks
    assert cache.picks_of("", range(11)) is None
    fill(pool, cache, range(20))  # the next turn
    cache.keep_picks("", range(20), [20], later := torch.zeros(2, 3))
    assert cache.picks_of("", range(20)) is later
    assert cache.picks_of("", range(14)) is cache.picks_of("", range(6)) is None
    cache.keep_picks("", range(14), [6, 14], picks)
    for tokens, known in (
        ([*range(14), 7, 7, 7, 7], picks),
        ([*range(10), 7, 7, 7, 7], None),
    ):
        found = cache.find("", tokens, len(tokens))
        assert found is not None
        assert found.picks is known
    cache.keep_picks("other", range(14), [14], picks)
    assert cache.find("other", list(range(14)), 14) is None


def test_nothing_is_known_after_it_was_cleared() -> None:
    cache = PrefixCache(pool := PagePool(6), SIZE, 2)
    snap(pool, cache, range(6))
    fill(pool, cache, range(12))
    cache.clear()
    assert (pool.idle, pool.free, cache.snapshots) == (0, 6, 0)
    assert cache.find("", list(range(12)), 12) is None


@dataclass
class Running:
    """A sequence of the state machine below."""

    tokens: list[int]
    pages: list[int]
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # slot and position


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, share, grow, take snapshots and go; pages hold the tokens they should."""

    @initialize(
        pages=st.integers(1, 12), slots=st.sampled_from([None, 0, 1, 3]), host=st.integers(0, 6)
    )
    def begin(self, pages: int, slots: int | None, host: int) -> None:
        self.pool = PagePool(pages)
        self.hosted: dict[int, list[int]] = {}  # by slot of host memory: as `held`
        self.host = HostPages(host, self.demote)
        self.cache = PrefixCache(self.pool, SIZE, slots, self.host)
        self.held: dict[int, list[int]] = {}  # by page: the tokens up to and in it
        self.saved: dict[int, list[int]] = {}  # by snapshot slot: its prefix
        self.running: list[Running] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18), key=st.sampled_from(["", "k"])
    )
    def start(self, tokens: list[int], key: str) -> None:
        tokens = [len(key), *tokens]
        found = self.cache.find(key, tokens, len(tokens) - 1)
        shared: list[int] = []
        if found is not None:
            assert found.tokens < len(tokens)
            for number, page in enumerate(found.pages):
                assert self.held[page] == tokens[: (number + 1) * SIZE]
            if found.snapshot is not None:
                assert self.saved[found.snapshot.slot] == tokens[: found.tokens]
                tail = found.snapshot.tail_spot
                if tail is not None:
                    held = self.held[tail.page] if tail.page >= 0 else self.hosted[tail.host]
                    assert held[: found.tokens] == tokens[: found.tokens]
            shared = found.pages
            self.pool.share(shared)
        needed = -(-len(tokens) // SIZE) - len(shared)
        if needed > self.pool.free:
            self.pool.give_back(shared)
            if found is not None:
                self.cache.release(found)
            return
        pages = [*shared, *self.pool.take(needed)]
        for number in range(len(shared), len(pages)):
            self.held[pages[number]] = tokens[: (number + 1) * SIZE]
        if found is not None:
            for number, spot in enumerate(found.hosted, start=len(shared)):
                assert self.hosted[spot.host] == tokens[: (number + 1) * SIZE]
                self.cache.promote(spot, pages[number])
            self.cache.release(found)
        self.running.append(Running(tokens, pages))

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        if not self.running or not self.cache.needs_snapshots:
            return
        one = data.draw(st.sampled_from(self.running))
        slot = self.cache.take_snapshot_slot()
        if slot is not None:
            self.saved[slot] = list(one.tokens)
            one.snapshots.append((slot, len(one.tokens)))

    @rule(data=st.data(), keep=st.booleans(), key=st.sampled_from(["", "k"]))
    def end(self, data: st.DataObject, keep: bool, key: str) -> None:
        if not self.running:
            return
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        mine = len(key) == one.tokens[0]
        if keep and mine:
            self.cache.keep(key, one.tokens, one.pages)
        for slot, position in one.snapshots:
            if keep and mine:
                tokens = one.tokens[:position]
                self.cache.keep_snapshot(key, tokens, one.pages, slot, passing=False)
            else:
                self.cache.give_back_snapshot_slot(slot)
        self.pool.give_back(one.pages)

    def demote(self, page: int, slot: int) -> None:
        self.hosted[slot] = self.held[page]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.host.used == 0

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        used = {page for one in self.running for page in one.pages}
        assert self.pool.used == len(used)
        assert 0 <= self.pool.idle <= self.pool.free <= self.pool.total
        assert len(set(self.host.free)) == len(self.host.free) <= self.host.total


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_use_of_the_cache_finds_what_was_kept = CacheMachine.TestCase


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 10))
def test_all_pages_can_be_taken_whatever_was_kept(tokens: list[int], pages: int) -> None:
    cache = PrefixCache(pool := PagePool(pages), SIZE)
    for first in range(0, len(tokens), 5):
        part = tokens[first : first + pages * SIZE]
        if part:
            fill(pool, cache, part)
    assert sorted(pool.take(pages)) == list(range(pages))
