"""Usage and timings of several answers together."""

from headroom.answers import AnswerDelta
from headroom.engine.request import Timings
from headroom.server.openai_shared import LEAST_LOGPROB, logprob_number, usage_and_timings
from tests.server.fakes import openai_usage


def answer(prompt: int, generated: int, *times: float, cost: str | None = None) -> AnswerDelta:
    experts = None if cost is None else {"cost": cost}
    return AnswerDelta(
        prompt_tokens=prompt, generated_tokens=generated, timings=Timings(*times, experts)
    )


def test_answers_to_one_prompt_count_its_tokens_once_and_take_the_longest_times() -> None:
    answers = [
        answer(10, 5, 0.5, 1.0, 2.0, cost="short"),
        answer(10, 7, 0.25, 2.0, 4.0, cost="long"),
        answer(20, 3, 0.125, 0.5, 1.0, cost="shortest"),
        answer(20, 1, 0.125, 0.5, 0.0),
    ]
    found = usage_and_timings(answers, choices_per_prompt=2)
    assert found["usage"] == openai_usage(30, 16)
    assert found["timings"] == {
        "cached_tokens": 0,
        "queue_ms": 500.0,
        "prefill_ms": 2000.0,
        "prefill_tokens_per_second": 30.0,  # all four were prefilled, 60 tokens in 2 s
        "decode_ms": 4000.0,
        "decode_tokens_per_second": 3.0,  # 16 tokens but the first of each, in 4 s
        "experts": {"cost": "long"},
    }


def test_guesses_are_told_if_there_were_any() -> None:
    timings = Timings(0.5, 1.0, 2.0, guessed=20, accepted=12, held_back=3)
    guessing = AnswerDelta(prompt_tokens=10, generated_tokens=5, timings=timings)
    told = usage_and_timings([guessing, guessing, answer(10, 5, 0.5, 1.0, 2.0)], 3)["timings"]
    assert (told["draft_tokens"], told["draft_tokens_accepted"]) == (40, 24)
    assert told["draft_tokens_held_back"] == 6
    assert "draft_tokens" not in usage_and_timings([answer(10, 5, 0.5, 1.0, 2.0)], 1)["timings"]


def test_rates_without_time_or_tokens_are_null() -> None:
    timings = usage_and_timings([answer(10, 1, 0.0, 0.0, 0.0)], 1)["timings"]
    assert timings["prefill_tokens_per_second"] is None
    assert timings["decode_tokens_per_second"] is None
    assert "experts" not in timings


def test_a_logprob_of_minus_infinity_becomes_a_number() -> None:
    assert logprob_number(float("-inf")) == LEAST_LOGPROB == -9999.0
    assert logprob_number(float("nan")) == LEAST_LOGPROB
    assert logprob_number(float("inf")) == 0
    assert logprob_number(-0.5) == -0.5
