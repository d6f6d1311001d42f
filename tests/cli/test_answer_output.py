"""What is seen of an answer while it comes, and the line about what it took."""

import io
from dataclasses import replace
from typing import Any

import pytest

from headroom.answers import AnswerDelta
from headroom.cli.answer_output import AnswerOutput, AnswerStats, cut_note, shown_seconds
from headroom.engine.request import SamplingParams, Timings

THINKING = [
    AnswerDelta(thought="\nLet me", thought_tokens=2),
    AnswerDelta(thought=" see.", thought_tokens=4),
    AnswerDelta(text="Four."),
    AnswerDelta(finish_reason="stop"),
]


def written(deltas: list[AnswerDelta], **settings: Any) -> str:
    file, seconds = io.StringIO(), iter(range(10, 100))
    out = AnswerOutput(file, clock=lambda: next(seconds), width=lambda: 20, **settings)
    for delta in deltas:
        out.write(delta)
    out.finish()
    return file.getvalue()


def test_a_pipe_gets_the_answers_text_as_it_is_and_one_line_feed() -> None:
    text = "one two three four five six seven\x1b[1m\n"
    assert written([AnswerDelta(text=text)], terminal=False) == text
    assert written([AnswerDelta(text=text[:-1])], terminal=False) == text
    assert written(THINKING, terminal=False) == "Four.\n"


def test_a_terminal_gets_words_wrapped() -> None:
    deltas = [AnswerDelta(text=text) for text in ("one two thr", "ee four fi", "ve six")]
    assert written(deltas, terminal=True) == "one two three four\nfive six\n"


def test_thoughts_are_dimmed() -> None:
    assert written(THINKING, terminal=True) == "\x1b[2mLet me see.\x1b[0m\n\nFour.\n"


def test_thoughts_can_be_folded_to_a_line_that_counts() -> None:
    assert written(THINKING, terminal=True, thoughts="folded") == (
        "\x1b[2m\r\x1b[Kthinking, 2 tokens\r\x1b[Kthinking, 4 tokens"
        "\r\x1b[Kthought for 5.0 s, 4 tokens\x1b[0m\n\nFour.\n"
    )


def test_thoughts_can_be_hidden() -> None:
    assert written(THINKING, terminal=True, thoughts="hidden") == "Four.\n"


@pytest.mark.parametrize("thoughts", ["shown", "folded"])
def test_a_thought_that_never_ends_does_not_leave_the_terminal_dim(thoughts: Any) -> None:
    shown = written(THINKING[:1], terminal=True, thoughts=thoughts)
    assert shown.endswith("\x1b[0m\n")
    assert "\n\n" not in shown


def stats(**more: Any) -> AnswerStats:
    timings = Timings(queue_s=0.25, prefill_s=0.5, decode_s=0.5, **more)
    last = AnswerDelta(finish_reason="stop", prompt_tokens=9, generated_tokens=5, timings=timings)
    return AnswerStats.of(last)


def test_the_line_tells_how_much_of_the_prompt_was_cached() -> None:
    assert (
        replace(stats(), cached_tokens=6)
        .line()
        .startswith("first token 750 ms, prompt 9 (6 cached), answer 5 tokens")
    )


def test_the_rate_counts_from_the_first_token() -> None:
    assert stats().line() == ("first token 750 ms, prompt 9, answer 5 tokens, 8.0 tokens/s")


def test_hits_are_told_where_experts_are_cold() -> None:
    assert stats(experts={"hit_rate": 0.914}).line().endswith(" tokens/s, expert hits 91 %")
    assert stats(experts={"hit_rate": None}).line().endswith(" tokens/s")


def test_accepted_drafts_are_told_where_tokens_were_guessed() -> None:
    timings = Timings(0.25, 0.5, 1.0, guessed=20, accepted=12)
    last = AnswerDelta(generated_tokens=31, prompt_tokens=9, timings=timings)
    assert AnswerStats.of(last).line().endswith(" tokens/s, accepted drafts 12 of 20")


def test_an_answer_of_one_token_has_no_rate() -> None:
    last = AnswerDelta(generated_tokens=1, prompt_tokens=1, timings=Timings(0.0, 0.5, 0.0))
    assert AnswerStats.of(last).line() == "first token 500 ms, prompt 1, answer 1 token"


@pytest.mark.parametrize(
    ("wanted", "reason", "note"),
    [
        (None, "stop", None),
        (3, "length", None),
        (4, "length", "cut after 3 tokens, not 4 (--max-tokens), where the context of 64 tokens "),
        (None, "length", "cut after 3 tokens, where the context of 64 tokens ends; raise "),
    ],
)
def test_only_the_contexts_end_cuts_an_answer(
    wanted: int | None, reason: Any, note: str | None
) -> None:
    answer = AnswerDelta(finish_reason=reason, generated_tokens=3)
    found = cut_note(answer, SamplingParams(max_tokens=wanted), 64)
    assert (found or "").startswith(note or "")
    assert (found is None) == (note is None)


def test_times_have_the_unit_that_suits_them() -> None:
    assert [shown_seconds(x) for x in (0.0004, 0.25, 1.5, 90)] == [
        *("0 ms", "250 ms", "1.50 s", "90.00 s")
    ]
