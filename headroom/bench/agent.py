"""AgentBench: an agent's session, whose prompts grow by the results of tools."""

import json
import random
from collections.abc import Iterator, Sequence

from headroom.bench.figures import AgentFigure, BenchSettings, Figures, FirstToken
from headroom.bench.prefix import TURNED_OFF, first_token, new_key
from headroom.bench.workload import TimedRequest, random_prompt
from headroom.engine.request import SamplingParams
from headroom.llm import OpenedModel
from headroom.progress import StepCounter
from headroom.text.tokenizer import Tokenizer

SEED = 21  # of the texts and their lengths
FIRST_SHARE = 0.4  # of the last prompt's tokens: instructions, tools and the task
LEAST_RESULT = 16  # tokens of a tool's result
UNEVEN = (1, 1, 2, 4, 9)  # results are so many times as long as others
NAMES = ("cache", "page", "slot", "token", "prompt", "session", "reader", "index", "table", "queue")
VERBS = ("open", "close", "read", "write", "find", "keep", "drop", "count", "merge", "check")


class AgentBench:
    """Measures the prompts of one session, first without the prefix cache and then with it.

    Each turn's prompt is the last one, its answer, and a tool's result. Answers are those of the
    model, always of the same length.
    """

    def __init__(
        self,
        opened: OpenedModel,
        settings: BenchSettings,
        steps: StepCounter,
        tokenizer: Tokenizer,
        figures: Figures,
    ) -> None:
        self._opened, self._settings, self._steps = opened, settings, steps
        self._tokenizer, self._figures = tokenizer, figures

    def run(self) -> None:
        """Measure the session both ways, and add the figure."""
        settings, plan = self._settings, self._opened.plan.settings
        tokens = min(settings.agent_tokens, plan.context - settings.agent_answer)
        lengths = piece_lengths(tokens, settings.agent_turns, settings.agent_answer)
        self._steps.begin("a session without the prefix cache")
        if not plan.prefix_cache:
            self._figures.left_out.append(f"agent: {TURNED_OFF}")
        elif min(lengths) < LEAST_RESULT:
            reason = f"{settings.agent_turns} turns do not fit into a context of {plan.context}"
            self._figures.left_out.append(f"agent: {reason}")
        else:
            self._measure(session_pieces(self._tokenizer, lengths))

    def _measure(self, pieces: Sequence[Sequence[int]]) -> None:
        engine, params = self._opened.engine, self._params(0)
        for key in (None, warm_up := new_key(), warm_up):  # also loads what is kept once
            prompt = random_prompt(len(pieces[0]), engine.vocab, SEED)
            first_token(self._opened, TimedRequest(engine, prompt, params, cache_key=key))
        cold, wanted = self._session(pieces, None)
        self._steps.begin("a session with the prefix cache")
        warm, found = self._session(pieces, new_key())
        self._figures.agent = AgentFigure(
            warm=tuple(warm),
            cold=tuple(cold),
            answer_tokens=self._settings.agent_answer,
            equal_answers=sum(map(list.__eq__, wanted, found)),
        )

    def _session(
        self, pieces: Sequence[Sequence[int]], key: str | None
    ) -> tuple[list[FirstToken], list[list[int]]]:
        """Return what each turn's prompt took, and the answers."""
        prompt: list[int] = []
        times, answers = [], []
        for turn, piece in enumerate(pieces):
            prompt += piece
            answer = TimedRequest(
                self._opened.engine,
                prompt,
                self._params(turn),
                cache_key=key,
                message_ends=self._tokenizer.stop_ids,
            )
            times.append(first_token(self._opened, answer))
            prompt += answer.tokens
            answers.append(answer.tokens)
        return times, answers

    def _params(self, turn: int) -> SamplingParams:
        return SamplingParams(
            temperature=self._settings.temperature,
            seed=turn,
            max_tokens=self._settings.agent_answer,
            ignore_eos=True,
            draft="none",
        )


def piece_lengths(tokens: int, turns: int, answer: int) -> list[int]:
    """Return how many tokens each turn adds: the first one most, and tools' results unevenly.

    With the answers in between, the last prompt has `tokens` tokens.
    """
    dice = random.Random(SEED)
    first = round(FIRST_SHARE * tokens) if turns > 1 else tokens
    left = tokens - first - (turns - 1) * answer
    weights = [dice.choice(UNEVEN) for _ in range(turns - 1)]
    lengths = [first, *(left * weight // sum(weights) for weight in weights)]
    lengths[-1] += tokens - (turns - 1) * answer - sum(lengths)
    return lengths


def session_pieces(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Return the tokens that each turn adds: what the agent is told, then tools' results."""
    dice = random.Random(SEED)
    end = sorted(tokenizer.stop_ids)[:1]  # ends every message
    kinds = (_listing, _source, _log)
    writers = [_instructions, *(kinds[turn % len(kinds)] for turn in range(len(lengths) - 1))]
    return [
        _filled(tokenizer, writer(dice), length - len(end)) + end
        for writer, length in zip(writers, lengths, strict=True)
    ]


def _filled(tokenizer: Tokenizer, lines: Iterator[str], length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += tokenizer.encode(next(lines) + "\n", special=False, add_bos=False)
    return tokens[:length]


def _instructions(dice: random.Random) -> Iterator[str]:
    """Yield the task, rules and tools of an agent, without an end."""
    yield "You are an agent that changes a program. Use the tools until the tests pass."
    yield f"Task: the {dice.choice(NAMES)} of the {dice.choice(NAMES)} is lost. Find out why."
    while True:
        verb, name, other = dice.choice(VERBS), dice.choice(NAMES), dice.choice(NAMES)
        yield f"- Never {verb} a {name} before the {other} is known; {dice.choice(VERBS)} it first."
        yield json.dumps(
            {
                "name": f"{verb}_{name}_{dice.randrange(100)}",
                "description": f"{verb.capitalize()} the {name} of a {other}.",
                "parameters": {
                    "type": "object",
                    "properties": {other: {"type": dice.choice(["string", "integer"])}},
                    "required": [other],
                },
            }
        )


def _listing(dice: random.Random) -> Iterator[str]:
    """Yield lines of a folder's listing."""
    while True:
        path = f"src/{dice.choice(NAMES)}/{dice.choice(VERBS)}_{dice.choice(NAMES)}.py"
        yield f"-rw-r--r-- {dice.randrange(100, 99999):>6} {path}"


def _source(dice: random.Random) -> Iterator[str]:
    """Yield lines of a program."""
    while True:
        verb, name, other = dice.choice(VERBS), dice.choice(NAMES), dice.choice(NAMES)
        yield f"def {verb}_{name}({other}: int, {name}s: list[str]) -> bool:"
        yield f"    if {other} > {dice.randrange(1000)} and not {name}s:"
        yield f'        raise ValueError("no {name} to {verb}")'
        yield f"    return {dice.choice(VERBS)}_{other}({name}s[{dice.randrange(10)}])"


def _log(dice: random.Random) -> Iterator[str]:
    """Yield lines of a run of tests."""
    while True:
        name, verb = dice.choice(NAMES), dice.choice(VERBS)
        word = dice.choice(["passed", "passed", "passed", "FAILED"])
        test = f"tests/test_{name}.py::test_{verb}_{dice.randrange(1000)}"
        yield f"{test} {word} in {dice.random():.3f} s"
