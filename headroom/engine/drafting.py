"""Drafting: which sequences of a step get guesses of their next tokens, and how many each."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from headroom.engine.request import GenerationRequest
from headroom.engine.scheduler import Scheduler, Turn
from headroom.errors import RequestError
from headroom.plan.settings import PlanSettings
from headroom.spec.drafter import Drafter


class Drafting:
    """Adds guesses to the turns of decode steps; only the engine's thread uses it."""

    def __init__(self, drafter: Drafter | None, settings: PlanSettings) -> None:
        self._drafter = drafter  # None: nothing is guessed
        self._most, self._rows = settings.draft_tokens, settings.verify_rows

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
        if self._drafter is None or any(not _decodes(turn) for turn in turns):
            return list(turns)
        left, found = self._rows - len(turns), []
        for at, turn in enumerate(turns):
            share = left // (len(turns) - at)  # of the rows that the sequences before have left
            guessing = self._with_guesses(turn, min(share, self._most), scheduler)
            left -= len(guessing.draft)
            found.append(guessing)
        return found

    def _with_guesses(self, turn: Turn, most: int, scheduler: Scheduler) -> Turn:
        sequence = turn.sequence
        if sequence.request.params.draft == "none":
            return turn
        # The step itself gives a token after the last right guess.
        most = min(most, sequence.limit - len(sequence.tokens) - 1)
        if most > 0:
            most = scheduler.room_for(sequence, 1 + most) - 1
        if most <= 0:
            return turn
        if sequence.guesser is None:
            assert self._drafter is not None
            sequence.guesser = self._drafter.begin()
        draft = sequence.guesser.guess(sequence.tokens, most)
        assert len(draft) <= most
        return replace(turn, draft=draft)


def _decodes(turn: Turn) -> bool:
    """Whether a turn computes the last token of an answer, which the host knows."""
    sequence = turn.sequence
    return turn.rows == sequence.pending == 1 and sequence.generated > 0 and not sequence.unread
