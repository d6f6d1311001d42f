"""The solver's choices: their exact limits, and the best candidate by trying all of them."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import OptionError
from headroom.options import Options
from headroom.plan.settings import PAGE_SIZE, pages_for
from headroom.plan.solver import (
    Candidate,
    Ranges,
    chunk_choices,
    context_choices,
    down_to_one,
    first_good,
    open_ranges,
    solve,
)


@pytest.mark.parametrize("most", [1, 63, 64, 65, 128, 255, 256, 257, 319, 320, 321, 8191, 8192])
def test_contexts_fall_by_whole_pages_to_the_least_one_worth_having(most: int) -> None:
    whole_pages = {tokens for tokens in range(256, most) if tokens % PAGE_SIZE == 0}
    assert context_choices(most) == tuple(sorted({most} | whole_pages, reverse=True))


def test_sequences_fall_by_one_and_chunks_by_halves() -> None:
    assert down_to_one(4) == (4, 3, 2, 1)
    assert down_to_one(1) == (1,)
    assert chunk_choices(512) == (512, 256, 128)
    assert chunk_choices(600) == (600, 300, 150, 128)
    assert chunk_choices(129) == (129, 128)
    assert chunk_choices(128) == (128,)
    assert chunk_choices(100) == (100,)


@given(st.lists(st.booleans(), max_size=9))
def test_the_first_good_choice_is_found_if_all_after_it_are_good(bad: list[bool]) -> None:
    count = sum(bad)  # as many bad choices, then good ones
    choices = range(100, 100 - len(bad), -1)
    wanted = next((x for index, x in enumerate(choices) if index >= count), None)
    assert first_good(choices, lambda x: 100 - x >= count) == wanted


def test_what_is_open_has_defaults_and_what_is_fixed_one_value() -> None:
    ranges = open_ranges(Options(), 4000)
    assert ranges.contexts[:3] == (4000, 3968, 3904)
    assert ranges.contexts[-1] == 256
    assert (ranges.parallels, ranges.chunks) == ((4, 3, 2, 1), (512, 256, 128))
    assert (ranges.cache_pages, ranges.cache_may_shrink) == (None, False)
    assert open_ranges(Options(), 100_000).contexts[0] == 8192
    fixed = open_ranges(Options(context=100, parallel=3, chunk=7, cache_tokens=130), 4000)
    assert fixed == Ranges((100,), (3,), (7,), 3, cache_may_shrink=True)
    # A cache of three pages holds no longer context.
    assert open_ranges(Options(cache_tokens=130), 4000).contexts[0] == 192


def test_a_context_may_be_as_long_as_the_model_and_the_cache_and_no_longer() -> None:
    assert open_ranges(Options(context=4000), 4000).contexts == (4000,)
    assert open_ranges(Options(context=192, cache_tokens=192), 4000).contexts == (192,)
    with pytest.raises(OptionError) as refused:
        open_ranges(Options(context=4001), 4000)
    assert refused.value.param == "context"
    with pytest.raises(OptionError) as refused:
        open_ranges(Options(context=193, cache_tokens=192), 4000)
    assert refused.value.param == "cache_tokens"


def test_a_cache_holds_all_sequences_or_what_is_fixed_and_shrinks_to_one_context() -> None:
    ranges = Ranges((100,), (3,), (512, 256, 128), None, cache_may_shrink=True)
    assert ranges.candidate(100, 3, 7) == Candidate(100, 3, 6, 7)
    assert ranges.least(100, 3, 7) == Candidate(100, 3, 2, 7)
    kept = Ranges((100,), (3,), (512,), None, cache_may_shrink=False)
    assert kept.least(100, 3, 7) == Candidate(100, 3, 6, 7)
    fixed = Ranges((100,), (3,), (512,), 9, cache_may_shrink=True)
    assert fixed.candidate(100, 3, 7) == fixed.least(100, 3, 7) == Candidate(100, 3, 9, 7)
    assert ranges.chunks_for(600) == ranges.chunks_for(512) == (512, 256, 128)
    assert ranges.chunks_for(511) == (256, 128)
    assert ranges.chunks_for(128) == (128,)
    assert ranges.chunks_for(127) == (127,)
    assert fixed.chunks_for(100) == (512,)


def memory_of(most: int, experts: int) -> Callable[[Candidate], int | None]:
    """Return what fits into a device of `most` bytes, whose rest is filled with experts."""

    def count_hot(candidate: Candidate) -> int | None:
        left = most - 3 * candidate.cache_pages - candidate.parallel - candidate.chunk // 16
        return None if left < 0 else min(left // 5, experts)

    return count_hot


@pytest.mark.parametrize("cache_may_shrink", [False, True])
@pytest.mark.parametrize("experts", [0, 12])
@pytest.mark.parametrize("most", [*range(4, 80, 3), 400])
def test_no_candidate_is_better_in_what_counts_most(
    most: int, experts: int, cache_may_shrink: bool
) -> None:
    ranges = Ranges(context_choices(512), (2, 1), (512, 256, 128), None, cache_may_shrink)
    count_hot = memory_of(most, experts)
    best: tuple[tuple[int, ...], Candidate] | None = None
    for chunks in ((512, 256, 128), (64, 32, 16)):
        for context, parallel, chunk in product(ranges.contexts, ranges.parallels, chunks):
            if chunk > context:
                continue
            least = pages_for(context) * (1 if cache_may_shrink else parallel)
            for pages in range(least, parallel * pages_for(context) + 1):
                tried = Candidate(context, parallel, pages, chunk)
                hot = count_hot(tried)
                if hot is not None:
                    rank = (context, hot, parallel, pages, chunk)
                    best = max(best or (rank, tried), (rank, tried), key=lambda one: one[0])
        if best is not None:
            break
    assert solve(ranges, count_hot) == (None if best is None else best[1])


def test_a_chunk_that_was_fixed_is_not_made_smaller() -> None:
    ranges = Ranges((512,), (1,), (512,), None, cache_may_shrink=False)
    needed = 3 * 8 + 1 + 32
    assert solve(ranges, memory_of(needed, 0)) == Candidate(512, 1, 8, 512)
    assert solve(ranges, memory_of(needed - 1, 0)) is None
