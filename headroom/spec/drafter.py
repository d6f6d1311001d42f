"""Drafters: what guesses how sequences go on. Which drafter an engine has is chosen here."""

from collections.abc import Sequence
from typing import Protocol

from headroom.errors import OptionError
from headroom.options import DRAFT_MODEL, Options
from headroom.spec.draft import Draft
from headroom.spec.network import NetworkDrafter
from headroom.spec.ngram import NgramDrafter
from headroom.split.pipeline import Pipeline

# How often a guess of a prediction head is taken to be right before any was judged.
MTP_CHANCE = 0.7
MODEL_CHANCE = 0.8  # the same of a draft model; published ones have 5 to 8 of 15 right


class Guesser(Protocol):
    """Guesses how one sequence goes on."""

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        """Return at most `most` guesses of what follows `tokens`, the prompt and the answer so far.

        Each call has the tokens of the call before and those that came since.
        """


class TextDrafter(Protocol):
    """Guesses how sequences go on by their tokens alone, each for itself, in next to no time."""

    @property
    def name(self) -> str:
        """The word of `--draft` and of requests that chooses it."""

    def begin(self) -> Guesser:
        """Return what guesses for a new sequence."""


Drafter = TextDrafter | NetworkDrafter


def open_drafter(options: Options, pipeline: Pipeline) -> Drafter | None:
    """Return the drafter that a plan's options choose; None: tokens come one at a time."""
    if not options.drafts:
        return None
    if options.draft_model is not None:
        return NetworkDrafter(DRAFT_MODEL, pipeline.guess, MODEL_CHANCE)
    if pipeline.has_draft_network:
        assert options.draft is not None
        return NetworkDrafter(options.draft, pipeline.guess, MTP_CHANCE)
    assert options.draft == NgramDrafter.name, "others are refused before anything is loaded"
    return NgramDrafter()


def check_draft(options: Options) -> None:
    """Refuse drafts that no engine runs, before a worker is started."""
    if not options.drafts:
        return
    if options.workers is not None:
        raise OptionError(
            "Worker processes do not verify guessed tokens.",
            hint="Leave out --workers, or choose --draft none.",
            param="draft",
        )
