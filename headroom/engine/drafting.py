"""Drafting: which sequences of a step get guesses of their next tokens, and how many each."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from headroom.engine.request import GenerationRequest
from headroom.engine.scheduler import Scheduler, Turn
from headroom.errors import RequestError
from headroom.plan.settings import PlanSettings
from headroom.spec.draft import NO_DRAFT, Draft
from headroom.spec.drafter import Drafter
from headroom.spec.governor import Governor, Offer


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
            raise RequestError(
                f"draft is {wanted!r}, and the engine was started with {known}.",
                hint=f"Start it with --draft {wanted}, or leave draft out.",
                param="draft",
            )

    def add_guesses(self, turns: SequenceOf[Turn], scheduler: Scheduler) -> list[Turn]:
        """Return the turns of a step, with guesses for the sequences that decode.

        Steps that read prompts get none, and neither do steps in which no row is left for them.
        """
        if self._drafter is None or not _all_decode(turns):
            return list(turns)
        left, drafts = max(0, self.rows - len(turns)), []
        for at, turn in enumerate(turns):
            share = left // (len(turns) - at)  # of the rows that the sequences before have left
            drafts.append(self._draft(turn, min(share, self._most)))
            left -= len(drafts[-1])
        counts = self._counts(turns, drafts)
        return [
            _with_guesses(turn, draft.first(count), scheduler)
            for turn, draft, count in zip(turns, drafts, counts, strict=True)
        ]

    def judge(self, turn: Turn, right: int) -> None:
        """Learn how many of a turn's guesses, one after another, were right."""
        turn.sequence.acceptance.record(turn.draft.kind, len(turn.draft), right)

    def record(self, turns: SequenceOf[Turn], tokens: int, seconds: float) -> None:
        """Learn what a step took that was read, in which so many tokens were generated."""
        if self._governor is not None and _decoded(turns):
            rows = sum(turn.all_rows for turn in turns)
            self._governor.record(len(turns), rows, tokens, seconds)

    def _draft(self, turn: Turn, most: int) -> Draft:
        sequence = turn.sequence
        # The step itself gives a token after the last right guess.
        most = min(most, sequence.limit - len(sequence.tokens) - 1)
        if sequence.request.params.draft == "none" or most <= 0:
            return NO_DRAFT
        if sequence.guesser is None:
            assert self._drafter is not None
            sequence.guesser = self._drafter.begin()
        draft = sequence.guesser.guess(sequence.tokens, most)
        assert len(draft) <= most
        return draft

    def _counts(self, turns: SequenceOf[Turn], drafts: SequenceOf[Draft]) -> list[int]:
        """Return how many guesses of each draft the step checks."""
        if self._governor is None or not any(drafts):
            return [len(draft) for draft in drafts]
        offers = [
            Offer(len(draft), turn.sequence.acceptance.chance(draft.kind, draft.chance))
            for turn, draft in zip(turns, drafts, strict=True)
        ]
        counts = self._governor.choose(len(turns), offers)
        for turn, draft, count in zip(turns, drafts, counts, strict=True):
            self.held_back += len(draft) - count
            turn.sequence.held_back += len(draft) - count
            if draft and not count:
                turn.sequence.acceptance.hold_back(draft.kind)
        return counts


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
