"""Which sequences get guesses, and how many: rows, pages, limits and prompts."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from headroom.engine.drafting import Drafting
from headroom.engine.pages import PagePool
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Limits, Scheduler, Turn
from headroom.engine.sequence import Sequence as Running
from headroom.layers.draft_network import Asked, Guessed
from headroom.spec.draft import Draft
from headroom.spec.network import NetworkDrafter
from tests.plan.shapes import settings

PAGE = 8


class Counting:
    """Guesses as many tokens as are wanted."""

    name = "ngram"

    def begin(self) -> "Counting":
        return self

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        return Draft.chain(range(most))


def decoding(length: int, limit: int = 1000, **params: object) -> Running:
    """A sequence with two generated tokens, the last of which is to be computed."""
    request = GenerationRequest(
        id="x",
        prompt=tuple(range(length - 2)),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        stop_ids=frozenset(),
    )
    sequence = Running(request, lambda event: None, limit=limit)
    sequence.tokens += [1, 2]
    sequence.cached = length - 1
    sequence.pages = list(range(-(-length // PAGE)))
    return sequence


def counts(
    sequences: Sequence[Running], *, pages: int = 50, guesses: int = 8, parallel: int = 40
) -> list[int]:
    """How many guesses each sequence of a step gets."""
    drafting = Drafting(Counting(), settings(parallel=parallel, draft_tokens=guesses), always=True)
    scheduler = Scheduler(Limits(40, 64, PAGE), PagePool(pages))
    turns = [Turn(sequence, 1) for sequence in sequences]
    return [len(turn.draft) for turn in drafting.add_guesses(turns, scheduler)]


def test_sequences_share_the_32_rows_of_a_step() -> None:
    assert counts([decoding(5)]) == [8]
    assert counts([decoding(5) for _ in range(3)]) == [8, 8, 8]
    assert counts([decoding(5) for _ in range(5)]) == [5, 5, 5, 6, 6]
    assert counts([decoding(5) for _ in range(40)]) == [0] * 40
    assert counts([decoding(5)], guesses=31) == [31]


def test_rows_that_one_sequence_leaves_go_to_the_next_ones() -> None:
    short = decoding(5, limit=7)  # may have two more tokens, the second of which no row needs
    assert counts([short, *(decoding(5) for _ in range(3))], guesses=31) == [1, 9, 9, 9]
    without = decoding(5, draft="none")
    assert counts([without, decoding(5), decoding(5)], guesses=31) == [0, 14, 15]


def test_an_answer_s_last_token_is_not_guessed() -> None:
    assert counts([decoding(5, limit=6)]) == [0]
    assert counts([decoding(5, limit=10)]) == [4]


def test_guesses_take_free_pages_alone() -> None:
    assert counts([decoding(PAGE - 2)], pages=1) == [8]  # one free page more: 8 rows and 2
    assert counts([decoding(PAGE - 2)], pages=0) == [2]
    assert counts([decoding(PAGE)], pages=0) == [0]
    assert counts([decoding(PAGE), decoding(PAGE)], pages=1) == [8, 0]


def test_a_step_that_reads_a_prompt_has_no_guesses() -> None:
    reading = decoding(5)
    reading.cached = 2
    drafting = Drafting(Counting(), settings(parallel=4, draft_tokens=8), always=True)
    scheduler = Scheduler(Limits(4, 64, PAGE), PagePool(9))
    turns = [Turn(decoding(5), 1), Turn(reading, 3)]
    assert drafting.add_guesses(turns, scheduler) == turns
    first = decoding(5)
    first.tokens = first.tokens[:3]  # its last prompt token is to be computed: nothing is generated
    first.cached = 2
    turns = [Turn(first, 1)]
    assert drafting.add_guesses(turns, scheduler) == turns


class Network:
    """Guesses as many tokens as are wanted, and records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Asked]] = []

    def guess(self, asked: Sequence[Asked]) -> list[Guessed]:
        self.asked.append(list(asked))
        return [Guessed(torch.arange(x.most)[:, None], None) for x in asked]


def test_a_draft_network_is_asked_once_for_all_sequences_and_for_no_more_than_is_checked() -> None:
    network = Network()
    limits = settings(parallel=9, draft_tokens=4)
    drafting = Drafting(NetworkDrafter("mtp", network.guess, 0.5), limits, always=True)
    scheduler = Scheduler(Limits(9, 64, PAGE), PagePool(0))
    starting = decoding(5)
    starting.starting = True  # its state is copied when the step is launched
    sequences = [decoding(5), decoding(PAGE - 2), decoding(5, draft="none"), decoding(5, limit=7)]
    turns = [Turn(sequence, 1) for sequence in [*sequences, starting, decoding(PAGE)]]
    found = drafting.add_guesses(turns, scheduler)
    # The second has room for two rows more, the last for none.
    assert [len(turn.draft) for turn in found] == [3, 2, 0, 1, 0, 0]
    (asked,) = network.asked
    assert [x.most for x in asked] == [3, 2, 1]
    assert [x.start for x in asked] == [4, PAGE - 3, 4]
    assert all(x.token == 2 and len(x.pages) * PAGE > x.start for x in asked)


def test_a_draft_network_is_not_asked_while_the_governor_measures_plain_steps() -> None:
    network = Network()
    limits = settings(parallel=2, draft_tokens=4)
    drafting = Drafting(NetworkDrafter("mtp", network.guess, 0.9), limits)
    scheduler = Scheduler(Limits(2, 64, PAGE), PagePool(9))
    for _ in range(2):
        turns = drafting.add_guesses([Turn(decoding(5), 1)], scheduler)
        assert not turns[0].draft
        drafting.record(turns, 1, 0.01)
    assert not network.asked
    (turn,) = drafting.add_guesses([Turn(decoding(5), 1)], scheduler)
    assert len(turn.draft) == network.asked[0][0].most > 0
    assert drafting.held_back == 0  # what was never guessed is not held back


def test_without_a_drafter_nothing_is_guessed() -> None:
    drafting = Drafting(None, settings(parallel=4))
    turns = [Turn(decoding(5), 1)]
    assert drafting.add_guesses(turns, Scheduler(Limits(4, 64, PAGE), PagePool(9))) == turns
    assert replace(turns[0]).all_rows == 1
