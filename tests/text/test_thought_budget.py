"""Thought budgets: efforts, the forced end of a thought, and a grammar after it."""

import random
from typing import Any

import numpy as np
import pytest

from headroom.errors import RequestError
from headroom.formats.vocabulary import Vocabulary
from headroom.text.answer_limits import AnswerLimits
from headroom.text.chat_template import ChatTemplate
from headroom.text.conversation import Conversation, OutputFormat, Thinking
from headroom.text.grammar import GrammarCompiler
from headroom.text.reasoning import Reasoning, find_reasoning
from headroom.text.spelling import BYTE_OF
from headroom.text.thought_budget import (
    EFFORT_SHARES,
    AnswerConstraint,
    closing_tokens,
    resolve_effort,
    thought_tokens,
)
from headroom.text.tokenizer import Tokenizer

# Only what the published templates write around a thought.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<|turn>{{ m.role }}\n"
    "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}"
    "{{ m.content }}<turn|>\n{% endfor %}"
)
MARKS = ("<think>", "</think>", "<|im_end|>", "<|channel>", "<channel|>", "<turn|>")


def tokenizer() -> Tokenizer:
    tokens = [*BYTE_OF, "ĊĊ", *MARKS]
    return Tokenizer.from_vocabulary(
        Vocabulary(
            model="gpt2", pre="qwen2", tokens=tokens,
            types=[*[1] * 257, 4, 4, 3, 3, 3, 3], scores=[], merges=["Ċ Ċ"],
            special_ids={"eos": tokens.index("<|im_end|>")}, add_bos=False,
        )
    )  # fmt: skip


TOKENS = tokenizer()
COMPILER = GrammarCompiler(TOKENS, TOKENS.vocab_size)


def reasoning(source: str = QWEN) -> Reasoning:
    found = find_reasoning(TOKENS, ChatTemplate(source, "", ""))
    assert found is not None
    return found


def limits(
    thinking: Thinking,
    wanted: OutputFormat | None = None,
    *,
    opened: bool = True,
    found: Reasoning | None = None,
    room: int = 1000,
) -> AnswerLimits:
    chat = Conversation(messages=(), output_format=wanted, thinking=thinking)
    prompt = "<|im_start|>assistant\n" + ("<think>\n" if opened else "")
    return AnswerLimits.of(COMPILER, chat, found or reasoning(), prompt=prompt, room=room)


def ids(text: str) -> list[int]:
    return TOKENS.encode(text, add_bos=False)


def begin(made: AnswerLimits, max_tokens: int | None = None) -> AnswerConstraint:
    constraint = made.begin(max_tokens)
    assert isinstance(constraint, AnswerConstraint)
    return constraint


def allowed(constraint: Any) -> set[int] | None:
    mask = constraint.mask()
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def push(constraint: Any, text: str) -> None:
    for token in ids(text):
        free = allowed(constraint)
        assert free is None or token in free
        constraint.advance(token)


def forced(constraint: Any) -> str:
    """Take tokens while only one is allowed, and return their text."""
    taken = []
    while (free := allowed(constraint)) is not None and len(free) == 1:
        taken += list(free)
        constraint.advance(taken[-1])
    return TOKENS.decode(taken)


@pytest.mark.parametrize(
    ("source", "closing"), [(QWEN, "\n</think>\n\n"), (GEMMA, "<channel|>")], ids=["qwen", "gemma"]
)
def test_the_template_says_how_a_model_ends_its_thought(source: str, closing: str) -> None:
    found = reasoning(source)
    assert found.closing == closing
    assert TOKENS.decode(closing_tokens(found, TOKENS)) == closing


def test_if_the_template_leaves_out_thoughts_the_mark_alone_ends_them() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    assert reasoning(source).closing == "</think>"
    assert reasoning("{{ raise_exception('no') }}{# </think> #}").closing == "</think>"


def test_a_spent_budget_forces_the_end_of_the_thought() -> None:
    constraint = begin(limits(Thinking(budget=5)))
    push(constraint, "abcd")
    assert allowed(constraint) is None
    assert not constraint.closed_hard
    push(constraint, "e")
    assert forced(constraint) == "\n</think>\n\n"
    assert constraint.closed_hard
    assert allowed(constraint) is None
    push(constraint, "text<think>")  # no second thought
    assert allowed(constraint) is None


def test_a_thought_that_the_model_ends_is_natural() -> None:
    constraint = begin(limits(Thinking(budget=50)))
    push(constraint, "ab\n</think>\n\n" + 100 * "x")
    assert allowed(constraint) is None
    assert not constraint.closed_hard


def test_without_a_budget_for_thoughts_the_prompt_s_thought_ends_at_once() -> None:
    constraint = begin(limits(Thinking(budget=0)))
    assert forced(constraint) == "\n</think>\n\n"


def test_a_thought_that_the_prompt_opens_although_the_client_wants_none_ends_at_once() -> None:
    constraint = begin(limits(Thinking(enabled=False)))
    assert forced(constraint) == "\n</think>\n\n"


@pytest.mark.parametrize("before", ["", "\n", " \n"])
def test_a_thought_that_the_answer_opens_is_counted_from_there(before: str) -> None:
    constraint = begin(limits(Thinking(budget=3), opened=False))
    push(constraint, before + "<think>abc")
    assert forced(constraint) == "\n</think>\n\n"


def test_an_answer_without_a_thought_is_not_limited() -> None:
    constraint = begin(limits(Thinking(budget=3), opened=False))
    push(constraint, "x<think>abcdefgh")
    assert allowed(constraint) is None
    assert not constraint.closed_hard


def test_only_tokens_near_the_end_of_a_budget_may_be_limited() -> None:
    constraint = begin(limits(Thinking(budget=5)))
    push(constraint, "abc")
    assert [constraint.may_limit(unread) for unread in range(4)] == [False, False, True, True]
    push(constraint, "de")
    assert constraint.may_limit(0)
    forced(constraint)
    assert not constraint.may_limit(100)
    opening = begin(limits(Thinking(budget=1), opened=False))
    assert [opening.may_limit(unread) for unread in range(2)] == [False, True]
    push(opening, "no thought")
    assert not opening.may_limit(9)
    assert begin(limits(Thinking(budget=50), CHOICE)).may_limit(0)


def test_without_a_budget_or_a_grammar_nothing_is_limited() -> None:
    assert limits(Thinking()).begin(None) is None
    assert limits(Thinking(enabled=True), opened=False).begin(7) is None


CHOICE = OutputFormat(kind="choice", value=["yes", "no"])


def test_a_grammar_applies_after_the_thought_only() -> None:
    constraint = begin(limits(Thinking(), CHOICE))
    free = allowed(constraint)
    assert free is not None
    assert not free & TOKENS.stop_ids  # the answer may not end inside the thought
    assert len(free) == TOKENS.vocab_size - len(TOKENS.stop_ids)
    push(constraint, "any thought, no\n</think>")
    assert {TOKENS.token_text(token) for token in allowed(constraint) or ()} == {
        *("y", "n", "\n", "\n\n")
    }
    push(constraint, "\n\nyes")
    assert allowed(constraint) == set(TOKENS.stop_ids)


def test_a_grammar_follows_a_thought_whose_budget_is_spent() -> None:
    constraint = begin(limits(Thinking(budget=2), CHOICE))
    push(constraint, "ab")
    for token in closing_tokens(reasoning(), TOKENS):
        assert allowed(constraint) == {token}
        constraint.advance(token)
    push(constraint, "no")
    assert allowed(constraint) == set(TOKENS.stop_ids)


def test_an_answer_with_a_grammar_may_begin_with_a_thought_of_its_own() -> None:
    start = TOKENS.find("<think>")
    constraint = begin(limits(Thinking(), CHOICE, opened=False))
    assert start in (allowed(constraint) or ())
    push(constraint, "<think>a</think>yes")
    assert allowed(constraint) == set(TOKENS.stop_ids)
    constraint = begin(limits(Thinking(), CHOICE, opened=False))
    push(constraint, "no")
    assert allowed(constraint) == set(TOKENS.stop_ids)


def test_a_model_that_may_not_think_begins_with_its_answer() -> None:
    constraint = limits(Thinking(enabled=False), CHOICE, opened=False).begin(None)
    assert constraint is not None
    found = {TOKENS.token_text(token) for token in allowed(constraint) or ()}
    assert found == {"y", "n"}


def test_an_answer_has_no_thought_if_the_prompt_has_closed_one() -> None:
    chat = Conversation(messages=(), output_format=CHOICE, thinking=Thinking(budget=5))
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    constraint = AnswerLimits.of(COMPILER, chat, reasoning(), prompt=prompt, room=9).begin(None)
    assert {TOKENS.token_text(token) for token in allowed(constraint) or ()} == {"y", "n"}


@pytest.mark.parametrize("opened", [False, True])
def test_random_answers_keep_to_budget_and_grammar(opened: bool) -> None:
    end = TOKENS.find("</think>")
    assert end is not None
    for seed in range(40):
        draw, taken = random.Random(seed), []
        constraint = begin(limits(Thinking(budget=seed), CHOICE, opened=opened))
        while not taken or taken[-1] not in TOKENS.stop_ids:
            free = allowed(constraint)
            assert free
            taken.append(draw.choice(sorted(free)))
            constraint.advance(taken[-1])
            assert len(taken) < seed + 30
        thought, mark, text = TOKENS.decode(taken[:-1]).partition("</think>")
        assert mark or not opened
        assert (text if mark else thought).strip() in ("yes", "no")


@pytest.mark.parametrize(
    ("thinking", "answer", "expected"),
    [
        (Thinking(), 1000, None),
        (Thinking(enabled=True), 1000, None),
        (Thinking(effort="none"), 20000, 0),
        (Thinking(effort="low"), 20096, 2000),
        (Thinking(effort="medium"), 20096, 8000),
        (Thinking(effort="high"), 20096, 16000),
        (Thinking(effort="max"), 20096, 16000),
        (Thinking(effort="high"), 100, 75),  # a quarter of a short answer is the reply's
        (Thinking(effort="high"), 0, 0),
        (Thinking(budget=500), 20096, 500),
        (Thinking(budget=50000), 20096, 16000),
        (Thinking(budget=500, effort="low"), 20096, 500),
        (Thinking(budget=0), 20096, 0),
    ],
)
def test_budgets_follow_from_tiers_and_leave_room_for_a_reply(
    thinking: Thinking, answer: int, expected: int | None
) -> None:
    assert thought_tokens(thinking, answer) == expected


def test_more_effort_never_thinks_less() -> None:
    for answer in (0, 1, 7, 100, 5000, 200_000):
        found = [thought_tokens(Thinking(effort=name), answer) for name in EFFORT_SHARES]
        assert found == sorted(found)  # type: ignore[type-var]


def test_the_budget_follows_from_the_tokens_of_the_answer_or_of_the_context() -> None:
    made = limits(Thinking(effort="high"), room=40)
    for most, budget in ((None, 30), (1000, 30), (8, 6)):
        constraint = begin(made, most)
        push(constraint, "x" * (budget - 1))
        assert allowed(constraint) is None
        push(constraint, "x")
        assert constraint.closed_hard


def test_an_effort_turns_thoughts_on_or_off_unless_the_client_says_so() -> None:
    assert resolve_effort(Thinking(effort="none")).enabled is False
    assert resolve_effort(Thinking(effort="low")).enabled is True
    assert resolve_effort(Thinking(effort="low", enabled=False)).enabled is False
    assert resolve_effort(Thinking()).enabled is None
    with pytest.raises(RequestError, match=r"'huge' is not known.*minimal") as refused:
        resolve_effort(Thinking(effort="huge"))
    assert refused.value.param == "reasoning_effort"
