"""The solver: settings left open, filled in the order of sacrifice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headroom.errors import OptionError
from headroom.options import Options
from headroom.plan.settings import PAGE_SIZE, pages_for

DEFAULT_CONTEXT, DEFAULT_PARALLEL, DEFAULT_CHUNK = 8192, 4, 512
LEAST_CONTEXT = 256  # least context that the solver chooses; users may fix a smaller one
LEAST_CHUNK = 128  # below this a chunk saves little memory and costs much speed


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of the settings that the solver may change."""

    context: int
    parallel: int
    cache_pages: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Ranges:
    """What each setting may be, best value first; a fixed setting has one value."""

    contexts: tuple[int, ...]
    parallels: tuple[int, ...]
    chunks: tuple[int, ...]
    cache_pages: int | None  # fixed; None: enough for all sequences at full length
    cache_may_shrink: bool  # down to one context, since the number of sequences is fixed

    def candidate(self, context: int, parallel: int, chunk: int) -> Candidate:
        """Return a candidate whose cache holds every sequence at its full length."""
        pages = self.cache_pages or parallel * pages_for(context)
        return Candidate(context, parallel, pages, chunk)

    def least(self, context: int, parallel: int, chunk: int) -> Candidate:
        """Return a candidate with the smallest cache that the ranges allow."""
        made = self.candidate(context, parallel, chunk)
        may_shrink = self.cache_may_shrink and self.cache_pages is None
        return replace(made, cache_pages=pages_for(context)) if may_shrink else made

    def chunks_for(self, context: int) -> tuple[int, ...]:
        """Return the chunks to try for a context: none longer than it, unless the user fixed it."""
        if len(self.chunks) == 1:
            return self.chunks
        return tuple(x for x in self.chunks if x <= context) or (context,)


# Returns the experts that a candidate keeps hot; None if the candidate does not fit.
CountHotExperts = Callable[[Candidate], int | None]


def open_ranges(options: Options, limit: int, limit_reason: str = "") -> Ranges:
    """Return the values that the options leave open, for a model of `limit` positions.

    `limit_reason` says why the model was made for more, if it was.
    """
    cache_pages = None if options.cache_tokens is None else pages_for(options.cache_tokens)
    _check_context(options, limit, limit_reason, cache_pages)
    cache_limit = limit if cache_pages is None else cache_pages * PAGE_SIZE
    context = min(DEFAULT_CONTEXT, limit, cache_limit)
    return Ranges(
        contexts=(options.context,) if options.context else context_choices(context),
        parallels=(options.parallel,) if options.parallel else down_to_one(DEFAULT_PARALLEL),
        chunks=(options.chunk,) if options.chunk else chunk_choices(DEFAULT_CHUNK),
        cache_pages=cache_pages,
        cache_may_shrink=options.parallel is not None,
    )


def context_choices(most: int) -> tuple[int, ...]:
    """Return contexts from `most` down, in whole pages, to the least one worth having."""
    least = min(LEAST_CONTEXT, most)
    below = range((most - 1) // PAGE_SIZE * PAGE_SIZE, least - 1, -PAGE_SIZE)
    return (most, *below)


def down_to_one(most: int) -> tuple[int, ...]:
    """Return the counts from `most` down to one."""
    return tuple(range(most, 0, -1))


def chunk_choices(most: int) -> tuple[int, ...]:
    """Return chunks from `most` down by halves."""
    choices = [most]
    while choices[-1] > LEAST_CHUNK:
        choices.append(max(LEAST_CHUNK, choices[-1] // 2))
    return tuple(choices)


def solve(ranges: Ranges, count_hot: CountHotExperts) -> Candidate | None:
    """Return the best candidate that fits, or None.

    Context counts most, then hot experts, sequences, cache, and chunk. What counts least is reduced
    first: each setting gets the largest value with which all later ones, at their smallest, still
    fit.
    """
    for chunks in (ranges.chunks, (64, 32, 16)):  # tiny chunks only where nothing else fits
        found = _solve_with(replace(ranges, chunks=chunks), count_hot)
        if found is not None or len(ranges.chunks) == 1:
            return found
    return None


def _solve_with(ranges: Ranges, count_hot: CountHotExperts) -> Candidate | None:
    parallel = ranges.parallels[-1]

    def fits(context: int) -> bool:
        return (
            count_hot(ranges.least(context, parallel, ranges.chunks_for(context)[-1])) is not None
        )

    context = first_good(ranges.contexts, fits)
    if context is None:
        return None
    chunks = ranges.chunks_for(context)
    chunk = chunks[-1]
    hot = count_hot(ranges.least(context, parallel, chunk))
    assert hot is not None

    def good(candidate: Candidate) -> bool:
        kept = count_hot(candidate)
        return kept is not None and kept >= hot

    found = first_good(ranges.parallels, lambda x: good(ranges.least(context, x, chunk)))
    parallel = found or parallel
    best = ranges.least(context, parallel, chunk)
    most_pages = ranges.candidate(context, parallel, chunk).cache_pages
    choices = range(most_pages, best.cache_pages - 1, -1)
    pages = first_good(choices, lambda x: good(replace(best, cache_pages=x)))
    best = replace(best, cache_pages=pages or best.cache_pages)
    return replace(best, chunk=first_good(chunks, lambda x: good(replace(best, chunk=x))) or chunk)


def first_good(choices: Sequence[int], good: Callable[[int], bool]) -> int | None:
    """Return the first good one of falling choices; all choices after a good one are good."""
    low, high = 0, len(choices)
    while low < high:
        middle = (low + high) // 2
        if good(choices[middle]):
            high = middle
        else:
            low = middle + 1
    return choices[low] if low < len(choices) else None


def _check_context(
    options: Options, limit: int, limit_reason: str, cache_pages: int | None
) -> None:
    if options.context is None:
        return
    if options.context > limit:
        most = f"the {limit} tokens that the model was made for"
        if limit_reason:
            most = f"the {limit} tokens that headroom can run of this model: {limit_reason}"
        raise OptionError(
            f"--context {options.context} is more than {most}.",
            hint=f"Try --context {limit}.",
            param="context",
        )
    if cache_pages is not None and cache_pages * PAGE_SIZE < options.context:
        raise OptionError(
            f"--cache-tokens {options.cache_tokens} cannot hold one conversation of "
            f"--context {options.context}.",
            hint=f"Try --cache-tokens {options.context} or --context {options.cache_tokens}.",
            param="cache_tokens",
        )
