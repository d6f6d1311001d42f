"""DraftBench: what guessing ahead gains if a given share of the guesses is right.

Nothing can guess the tokens of random weights. So the tokens of an answer are recorded without
guesses first, and a drafter guesses these with a given probability each: steps cost what they cost
with any drafter that needs no model. A draft model guesses, too, and its tokens are replaced, so
that its time counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from headroom.bench.figures import BenchSettings, DraftFigure, Figures
from headroom.bench.workload import TimedRequest, random_prompt
from headroom.engine.request import SamplingParams
from headroom.layers.draft_network import Asked, Guessed
from headroom.llm import OpenedModel
from headroom.options import DRAFT_MODEL, NGRAM
from headroom.progress import StepCounter
from headroom.spec.draft import NO_DRAFT, Draft
from headroom.spec.drafter import Drafter
from headroom.spec.network import NetworkDrafter

SEED = 22  # of the prompt and of which guesses are right


class Imposed:
    """Guesses recorded tokens, each of which is right with a given probability.

    Only one request runs, so that the place in its text says what comes.
    """

    def __init__(self) -> None:
        self._text: tuple[int, ...] = ()  # a prompt and its answer
        self._share, self._vocab = 0.0, 2
        self._chance = Random(SEED)
        # The engine's draft network, whose work is measured though its tokens are not used.
        self.network: Callable[[Sequence[Asked]], list[Guessed]] | None = None

    def drafter(self, *, network: bool) -> Drafter:
        """Return what an engine asks: as a draft network, or as a drafter that needs no model."""
        return NetworkDrafter(DRAFT_MODEL, self.replaced, 1.0) if network else ImposedDrafter(self)

    def impose(self, text: Sequence[int], share: float, vocab: int) -> None:
        """Guess so that the share of `text`'s tokens is right; others of the vocabulary are not."""
        self._text, self._share, self._vocab = tuple(text), share, vocab
        self._chance = Random(SEED)

    def tokens(self, known: int, most: int) -> list[int]:
        """Return recorded tokens after so many known ones, some of them changed."""
        return [
            token if self._chance.random() < self._share else (token + 1) % self._vocab
            for token in self._text[known : known + most]
        ]

    def replaced(self, asked: Sequence[Asked]) -> list[Guessed]:
        """Let the network guess, and return its guesses with the tokens to be guessed first."""
        assert self.network is not None
        found = []
        for one, guessed in zip(asked, self.network(asked), strict=True):
            rows = guessed.tokens.clone()
            for row, token in zip(rows, self.tokens(one.start + 1, len(rows)), strict=False):
                same = row == token
                row[same] = row[0].clone()  # the two change places
                row[0] = token
            found.append(replace(guessed, tokens=rows))
        return found


class ImposedDrafter:
    """Guesses chains of recorded tokens without a network."""

    name = NGRAM  # requests need not choose it

    def __init__(self, imposed: Imposed) -> None:
        self._imposed = imposed

    def begin(self) -> "ImposedDrafter":
        """Return the drafter itself: only one request runs."""
        return self

    def guess(self, tokens: Sequence[int], most: int) -> Draft:
        """Return the next recorded tokens, some of them changed."""
        coming = self._imposed.tokens(len(tokens), most)
        return Draft.chain(coming) if coming else NO_DRAFT


class DraftBench:
    """Measures an answer without guesses, and again with each share of right guesses."""

    def __init__(
        self,
        opened: OpenedModel,
        settings: BenchSettings,
        steps: StepCounter,
        imposed: Imposed,
        figures: Figures,
    ) -> None:
        self._opened, self._settings, self._steps = opened, settings, steps
        self._imposed, self._figures = imposed, figures
        self._prompt = random_prompt(settings.contexts[0], opened.engine.vocab, SEED)

    def run(self) -> None:
        """Measure all shares, and add the figures."""
        self._answer("none", 2)  # loads what is loaded once
        self._steps.begin("an answer without guesses")
        plain = self._answer("none", self._settings.tokens)
        for share in self._settings.accept:
            self._steps.begin(f"an answer with {share:.0%} of the guesses right")
            text = (*self._prompt, *plain.tokens)
            self._imposed.impose(text, share, self._opened.engine.vocab)
            before = self._opened.engine.stats()
            found = self._answer(None, self._settings.tokens)
            after = self._opened.engine.stats()
            self._figures.drafts.append(
                DraftFigure(
                    share=share,
                    guesses=self._opened.plan.settings.draft_tokens,
                    context=len(self._prompt),
                    tokens=len(found.tokens) - 1,  # the first one comes from the prompt
                    steps=after.steps - before.steps - self._prompt_steps,
                    guessed=after.guessed_tokens - before.guessed_tokens,
                    right=after.accepted_tokens - before.accepted_tokens,
                    seconds=found.times[-1] - found.times[0],
                    plain_s=plain.times[-1] - plain.times[0],
                    equal=found.tokens == plain.tokens,
                )
            )

    @property
    def _prompt_steps(self) -> int:
        return -(-len(self._prompt) // self._opened.plan.settings.chunk)

    def _answer(self, draft: str | None, tokens: int) -> TimedRequest:
        params = SamplingParams(
            temperature=self._settings.temperature,
            seed=SEED,
            max_tokens=tokens,
            ignore_eos=True,
            draft=draft,
        )
        answer = TimedRequest(self._opened.engine, self._prompt, params)
        answer.submit()
        answer.wait(tokens)
        return answer
