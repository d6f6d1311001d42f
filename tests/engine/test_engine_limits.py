"""Constrained answers: every token is allowed, and a GPU draws the host's tokens."""

import queue
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.layers.draws import TokenMask
from headroom.split.gpu_stage import GpuResult
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import VOCAB, TableModel, device_engine, host_engine, settings

LONG = {"max_tokens": 30, "ignore_eos": True}
CASES = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "plain": SamplingParams(seed=1, **LONG),
    "filters": SamplingParams(seed=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, **LONG),
    "penalties": SamplingParams(
        seed=3, repetition_penalty=1.4, frequency_penalty=0.5, penalty_window=12, **LONG
    ),
    "bias": SamplingParams(seed=4, logit_bias={5: 4.0, 9: -50.0, 7: 3.5}, **LONG),
    "logprobs": SamplingParams(seed=5, logprobs=3, **LONG),
    "prompt logprobs": SamplingParams(seed=6, prompt_logprobs=True, logprobs=1, **LONG),
    "whole history": SamplingParams(seed=7, presence_penalty=0.5, penalty_window=0, **LONG),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """Let this machine have the stand-in GPU."""
    with stand_in_gpu(monkeypatch) as made:
        yield made


FREE = range(6, 9)


class Rules:
    """Allows tokens that depend on all tokens before them; every fifth time any token.

    From the seventh to the ninth of every ten tokens, it says beforehand that any token may come.
    """

    def __init__(self, seed: int = 0, fail_at: int = -1) -> None:
        self._seed, self._fail_at = seed, fail_at
        self.taken: list[int] = []

    def may_limit(self, unread: int) -> bool:
        return (len(self.taken) + unread) % 10 not in FREE

    def mask(self) -> TokenMask | None:
        assert self.may_limit(0)
        if len(self.taken) == self._fail_at:
            raise ValueError("out of rules")
        free = self.allowed(self.taken)
        if free is None:
            return None
        bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.bool_)
        bits[sorted(free)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def advance(self, token: int) -> None:
        self.taken.append(token)

    def allowed(self, before: Sequence[int]) -> set[int] | None:
        """The tokens that may follow; None: any."""
        if len(before) % 5 == 4 or len(before) % 10 in FREE:
            return None
        draw = random.Random(f"{self._seed} {list(before)}")
        return set(draw.sample(range(VOCAB), draw.choice((1, 3, 40))))

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether each token was allowed where it came."""
        steps = [(self.allowed(tokens[:at]), token) for at, token in enumerate(tokens)]
        return all(free is None or token in free for free, token in steps)


def start(
    engine: Engine,
    name: str,
    params: SamplingParams,
    rules: Rules | None,
    length: int = 5,
    stop_ids: frozenset[int] = frozenset(),
) -> "queue.SimpleQueue[TokenEvent]":
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    prompt = tuple((7 * number + len(name)) % 290 for number in range(length))
    engine.submit(
        GenerationRequest(
            id=name, prompt=prompt, params=params, stop_ids=stop_ids, constraint=rules
        ),
        events.put,
    )
    return events


def ended(events: "queue.SimpleQueue[TokenEvent]") -> list[TokenEvent]:
    found = [events.get(timeout=30)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=30))
    return found


def told(events: list[TokenEvent]) -> list[object]:
    return [(e.token, e.logprobs, e.prompt_logprobs, e.finish_reason, e.error) for e in events]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("capturable", [True, False])
def test_a_device_draws_the_limited_tokens_that_the_host_draws(name: str, capturable: bool) -> None:
    device, _ = device_engine(TableModel(capturable), settings())
    host = host_engine(TableModel(), settings())
    found, wanted = (
        ended(start(engine, "a", CASES[name], Rules(3), 40)) for engine in (device, host)
    )
    device.close()
    host.close()
    assert told(found) == told(wanted)
    assert len(found) == 30
    assert Rules(3).holds(tokens_of(found))


@pytest.mark.parametrize("parallel", [3, 8])
def test_limited_and_free_answers_share_steps_and_stay_what_they_are_alone(parallel: int) -> None:
    wanted = []
    for number, (name, params) in enumerate(CASES.items()):
        host = host_engine(TableModel(), settings())
        rules = Rules(number) if number % 3 else None
        wanted.append(told(ended(start(host, name, params, rules, 3 + 9 * number))))
        host.close()
    device, _ = device_engine(TableModel(), settings(parallel=parallel))
    for engine in (device, host_engine(TableModel(), settings(parallel=parallel))):
        running = [
            start(engine, name, params, Rules(number) if number % 3 else None, 3 + 9 * number)
            for number, (name, params) in enumerate(CASES.items())
        ]
        assert [told(ended(events)) for events in running] == wanted
        engine.close()


def test_many_limited_answers_at_once_are_drawn_right() -> None:
    plan = settings(parallel=40, cache_tokens=8192)
    answers = []
    device, _ = device_engine(TableModel(), plan)
    for engine in (device, host_engine(TableModel(), plan)):
        running = [
            start(engine, "x" * n, CASES["plain"], Rules(n) if n % 2 else None) for n in range(40)
        ]
        answers.append([told(ended(events)) for events in running])
        engine.close()
    assert answers[0] == answers[1]


def test_preempted_answers_go_on_where_their_rules_were() -> None:
    plan = settings(cache_tokens=320, context=256, chunk=32)
    params = SamplingParams(seed=3, temperature=0.9, max_tokens=60, ignore_eos=True)
    device, _ = device_engine(TableModel(), plan)
    answers = []
    for engine in (device, host_engine(TableModel(), plan)):
        running = [start(engine, "x" * n, params, Rules(n), 30 + 17 * n) for n in range(1, 7)]
        found = [ended(events) for events in running]
        assert engine.stats().preemptions > 0
        engine.close()
        answers.append([told(events) for events in found])
        for number, events in enumerate(found, start=1):
            assert Rules(number).holds(tokens_of(events))
            assert len(events) == 60
    assert answers[0] == answers[1]


def test_limited_steps_are_launched_before_the_last_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, stage = device_engine(TableModel(), settings())
    order: list[str] = []
    step, tokens, draw = stage.step, GpuResult.tokens, GpuResult.draw_limited

    def launch(batch, draws, received):  # type: ignore[no-untyped-def]
        order.append("launch")
        return step(batch, draws, received)

    def read(self: GpuResult) -> list[int | None]:
        order.append("read")
        return tokens(self)

    def draw_limited(self: GpuResult, masks: dict[int, TokenMask | None]) -> None:
        order.append("draw")
        draw(self, masks)

    monkeypatch.setattr(stage, "step", launch)
    monkeypatch.setattr(GpuResult, "tokens", read)
    monkeypatch.setattr(GpuResult, "draw_limited", draw_limited)
    ended(start(engine, "a", SamplingParams(max_tokens=3, ignore_eos=True), Rules()))
    engine.close()
    assert order == [
        *("launch", "draw"),
        *("launch", "read", "draw"),
        *("launch", "read", "draw"),
        "read",
    ]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_failing_constraint_ends_its_request_and_no_other(on_device: bool) -> None:
    engine = (
        device_engine(TableModel(), settings())[0]
        if on_device
        else host_engine(TableModel(), settings())
    )
    params = CASES["plain"]
    alone = told(ended(start(engine, "other", params, Rules(1))))
    running = [start(engine, "other", params, Rules(1)), start(engine, "b", params, Rules(2, 4))]
    other, broken = (ended(events) for events in running)
    assert told(other) == alone
    assert (broken[-1].finish_reason, broken[-1].error) == ("error", "ValueError: out of rules")
    assert len(tokens_of(broken)) == 4
    assert engine.stats().cache_pages_used == 0
    engine.close()


def test_a_stop_token_ends_a_limited_answer_while_the_next_step_runs() -> None:
    device, _ = device_engine(TableModel(), settings())
    wanted = tokens_of(ended(start(device, "a", CASES["plain"], Rules())))
    params = SamplingParams(seed=1, max_tokens=30)
    found = ended(start(device, "a", params, Rules(), stop_ids=frozenset({wanted[7]})))
    assert tokens_of(found) == wanted[: wanted.index(wanted[7]) + 1]
    assert found[-1].finish_reason == "stop"
    # Nothing that the ended answer left in tables or masks limits the next one.
    host = host_engine(TableModel(), settings())
    after, free = (
        tokens_of(ended(start(engine, "b", CASES["plain"], None))) for engine in (device, host)
    )
    host.close()
    device.close()
    assert after == free


def test_several_answers_with_one_seed_draw_differently_under_rules() -> None:
    device, _ = device_engine(TableModel(), settings())
    found = set()
    for draw in range(3):
        params = SamplingParams(seed=1, draw=draw, **LONG)
        found.add(tuple(tokens_of(ended(start(device, "a", params, Rules())))))
    device.close()
    assert len(found) == 3
