"""PrefixBench: the time to the first token of prompts that begin like earlier ones."""

import statistics
import uuid
from collections.abc import Sequence

from headroom.bench.figures import BenchSettings, Figures, FirstToken, PrefixFigure
from headroom.bench.workload import TimedRequest, move_trace, random_prompt
from headroom.engine.request import SamplingParams
from headroom.llm import OpenedModel
from headroom.progress import StepCounter

TURNED_OFF = "--no-prefix-cache turns the cache off"


class PrefixBench:
    """Measures each prompt cold, again, with more tokens at the end, and with another half."""

    def __init__(
        self, opened: OpenedModel, settings: BenchSettings, steps: StepCounter, figures: Figures
    ) -> None:
        self._opened, self._settings = opened, settings
        self._steps, self._figures = steps, figures

    def run(self) -> None:
        """Measure every prompt that fits, and add the figures."""
        plan = self._opened.plan.settings
        for tokens in self._settings.prompts:
            self._steps.begin(f"prefixes of {tokens} tokens")
            if not plan.prefix_cache:
                self._figures.left_out.append(f"prefix of {tokens}: {TURNED_OFF}")
            elif tokens + self._settings.longer >= plan.context:
                reason = f"the context holds {plan.context}"
                self._figures.left_out.append(f"prefix of {tokens}: {reason}")
            else:
                self._figures.prefixes.append(self._measure(tokens))

    def _measure(self, tokens: int) -> PrefixFigure:
        """Return the medians of several rounds, after one that warms up.

        Each round has tokens of its own and a key of its own, so that its first prompt is cold.
        """
        rounds = [self._round(tokens, seed) for seed in range(1 + self._settings.rounds)][1:]
        cold, same, longer, branch = (_median(found) for found in zip(*rounds, strict=True))
        return PrefixFigure(cold=cold, same=same, longer=longer, branch=branch)

    def _round(self, tokens: int, seed: int) -> list[FirstToken]:
        vocab, half = self._opened.engine.vocab, tokens // 2
        prompt = random_prompt(tokens, vocab, seed)
        more = random_prompt(self._settings.longer, vocab, -1 - seed)
        other = random_prompt(tokens - half, vocab, -1 - seed)
        key = new_key()
        prompts = (prompt, prompt, prompt + more, prompt[:half] + other)
        return [self._first_token(one, key) for one in prompts]

    def _first_token(self, prompt: Sequence[int], key: str) -> FirstToken:
        params = SamplingParams(temperature=self._settings.temperature, max_tokens=1)
        answer = TimedRequest(self._opened.engine, prompt, params, cache_key=key)
        return first_token(self._opened, answer)


def first_token(opened: OpenedModel, answer: TimedRequest) -> FirstToken:
    """Ask for an answer, wait until it has ended, and return what its first token took."""
    answer.submit()
    answer.wait(answer.request.params.max_tokens or 1)
    answer.end()
    assert answer.last is not None
    found = FirstToken(len(answer.request.prompt), answer.last.cached_tokens, answer.first_token_s)
    move_trace(opened, found.computed)
    return found


def new_key() -> str:
    """Return a cache key that no request of this run or of an earlier one has had."""
    return f"bench {uuid.uuid4().hex}"


def _median(found: Sequence[FirstToken]) -> FirstToken:
    seconds = statistics.median(one.seconds for one in found)
    return FirstToken(found[0].prompt, min(one.cached for one in found), seconds)
