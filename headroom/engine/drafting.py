"""Drafting: which sequences of a step get guesses of their next tokens, and how many each."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from headroom.engine.request import GenerationRequest
from headroom.engine.scheduler import Scheduler, Turn
from headroom.errors import RequestError
from headroom.layers.draft_network import Asked
from headroom.options import DRAFT_MODEL
from headroom.plan.settings import PlanSettings
from headroom.spec.draft import NO_DRAFT, Draft
from headroom.spec.drafter import Drafter, TextDrafter
from headroom.spec.governor import Governor, Offer
from headroom.spec.network import NetworkDrafter


class Drafting:
    """Adds guesses to the turns of decode steps; only the engine's thread uses it."""

    def __init__(
        self,
        drafter: Drafter | None,  # None: nothing is guessed
        settings: PlanSettings,
        *,
        always: bool = False,  # check guesses even where that is slower
    ) -> None:
        self._drafter = drafter
        self._most = settings.draft_tokens
        self.rows = settings.verify_rows  # of a step with guesses: fewer while memory is short
        self.held_back = 0  # guesses that were not checked, since that would not have paid
        self._governor = None if drafter is None or always else Governor()

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request for a drafter that the engine was not started with."""
        wanted = request.params.draft
        known = "none" if self._drafter is None else self._drafter.name
        if wanted not in (None, "none", known):
            option = "MODEL, a draft model," if wanted == DRAFT_MODEL else f"{wanted},"
            raise RequestError(
                f"draft is {wanted!r}, and the engine was started with {known}.",
                hint=f"Start it with --draft {option} or leave draft out.",
                param="draft",
            )

    def add_guesses(self, turns: SequenceOf[Turn], scheduler: Scheduler) -> list[Turn]:
        """Return the turns of a step, with guesses for the sequences that decode.

        Steps that read prompts get none, and neither do steps in which no row is left for them.
        """
        if self._drafter is None or not _all_decode(turns):
            return list(turns)
        if isinstance(self._drafter, NetworkDrafter):
            return self._guess_together(turns, scheduler, self._drafter)
        return self._guess_each(turns, scheduler, self._drafter)

    def _guess_each(
        self, turns: SequenceOf[Turn], scheduler: Scheduler, drafter: TextDrafter
    ) -> list[Turn]:
        """Guess for each sequence, then choose how many guesses are checked."""
        left, drafts = max(0, self.rows - len(turns)), []
        for at, turn in enumerate(turns):
            share = left // (len(turns) - at)  # of the rows that the sequences before have left
            drafts.append(_text_draft(turn, self._most_guesses(turn, share), drafter))
            left -= len(drafts[-1])
        counts = self._counts(turns, drafts)
        return [
            _with_guesses(turn, draft.first(count), scheduler)
            for turn, draft, count in zip(turns, drafts, counts, strict=True)
        ]

    def _guess_together(
        self, turns: SequenceOf[Turn], scheduler: Scheduler, drafter: NetworkDrafter
    ) -> list[Turn]:
        """Choose how many guesses each sequence gets, then guess for all of them at once."""
        left, offers = max(0, self.rows - len(turns)), []
        for at, turn in enumerate(turns):
            most = self._most_guesses(turn, left // (len(turns) - at))
            left -= most
            offers.append(Offer(most, turn.sequence.acceptance.chance(0, drafter.chance)))
        counts = self._chosen(turns, offers, [0] * len(turns))
        asked: dict[int, Asked] = {}
        for at, (turn, count) in enumerate(zip(turns, counts, strict=True)):
            if count and (room := scheduler.room_for(turn.sequence, 1 + count) - 1):
                asked[at] = _asked(turn, room)
        drafts = dict(zip(asked, drafter.guess(list(asked.values())), strict=True)) if asked else {}
        return [replace(turn, draft=drafts.get(at, NO_DRAFT)) for at, turn in enumerate(turns)]

    def judge(self, turn: Turn, right: int) -> None:
        """Learn how many of a turn's guesses, one after another, were right."""
        turn.sequence.acceptance.record(turn.draft.kind, len(turn.draft), right)

    def record(self, turns: SequenceOf[Turn], tokens: int, seconds: float) -> None:
        """Learn what a step took that was read, in which so many tokens were generated."""
        if self._governor is not None and _decoded(turns):
            rows = sum(turn.all_rows for turn in turns)
            self._governor.record(len(turns), rows, tokens, seconds)

    def _most_guesses(self, turn: Turn, share: int) -> int:
        """Return how many guesses a sequence may get that has a share of a step's rows."""
        sequence = turn.sequence
        # What a starting sequence knows is copied when its step is launched.
        if sequence.request.params.draft == "none" or sequence.starting:
            return 0
        # The step itself gives a token after the last right guess.
        return max(0, min(share, self._most, sequence.limit - len(sequence.tokens) - 1))

    def _counts(self, turns: SequenceOf[Turn], drafts: SequenceOf[Draft]) -> list[int]:
        """Return how many guesses of each draft the step checks."""
        if not any(drafts):
            return [0] * len(drafts)
        offers = [
            Offer(len(draft), turn.sequence.acceptance.chance(draft.kind, draft.chance))
            for turn, draft in zip(turns, drafts, strict=True)
        ]
        counts = self._chosen(turns, offers, [draft.kind for draft in drafts])
        for turn, draft, count in zip(turns, drafts, counts, strict=True):
            self.held_back += len(draft) - count
            turn.sequence.held_back += len(draft) - count
        return counts

    def _chosen(
        self, turns: SequenceOf[Turn], offers: SequenceOf[Offer], kinds: SequenceOf[int]
    ) -> list[int]:
        """Return how many guesses of each offer the governor wants; all without a governor."""
        if self._governor is None:
            return [offer.guesses for offer in offers]
        counts = self._governor.choose(len(turns), offers)
        for turn, offer, kind, count in zip(turns, offers, kinds, counts, strict=True):
            if offer.guesses and not count:
                turn.sequence.acceptance.hold_back(kind)
        return counts


def _text_draft(turn: Turn, most: int, drafter: TextDrafter) -> Draft:
    if most <= 0:
        return NO_DRAFT
    if turn.sequence.guesser is None:
        turn.sequence.guesser = drafter.begin()
    draft = turn.sequence.guesser.guess(turn.sequence.tokens, most)
    assert len(draft) <= most
    return draft


def _asked(turn: Turn, most: int) -> Asked:
    """Return what a draft network must know of a sequence to guess at most `most` tokens."""
    sequence = turn.sequence
    return Asked(
        token=sequence.tokens[-1],
        start=sequence.cached,
        pages=sequence.page_table(),
        state_slot=sequence.state_slot,
        most=most,
    )


def _with_guesses(turn: Turn, draft: Draft, scheduler: Scheduler) -> Turn:
    """Return a turn with as many guesses as there is room for."""
    if not draft:
        return turn
    room = scheduler.room_for(turn.sequence, 1 + len(draft)) - 1
    return replace(turn, draft=draft.first(room))


def _all_decode(turns: SequenceOf[Turn]) -> bool:
    """Whether each turn computes the last token of an answer, which the host knows."""
    return all(
        turn.rows == turn.sequence.pending == 1
        and turn.sequence.generated > 0
        and not turn.sequence.unread
        for turn in turns
    )


def _decoded(turns: SequenceOf[Turn]) -> bool:
    """Whether a step that was read had one own row of each sequence."""
    return all(turn.rows == 1 for turn in turns)
