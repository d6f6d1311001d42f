"""ToolMemory: finds answers by their calls, and drops old ones at its limits."""

from dataclasses import replace
from typing import Any

import pytest

from headroom.text.answer_parser import AnswerParts, CallDelta, ToolCall, WrittenAnswer
from headroom.text.tool_memory import RememberedAnswer, ToolMemory


def answer(call_id: str, *, size: int = 10) -> RememberedAnswer:
    calls = (
        ToolCall(id=call_id, name="f", arguments='{"a": 1}'),
        ToolCall(id=f"{call_id}-2", name="g", arguments='{"broken'),
    )
    return RememberedAnswer(
        prompt_end="",
        tokens=(1,),
        raw="x" * size,
        after_thought=0,
        thought="",
        text="Hm. ",
        calls=calls,
    )


def message(call_id: str, **changes: Any) -> dict[str, Any]:
    calls = [
        {"id": call_id, "function": {"name": "f", "arguments": '{ "a":1 }'}},
        {"id": f"{call_id}-2", "function": {"name": "g", "arguments": '{"broken'}},
    ]
    return {"role": "assistant", "content": "Hm.", "tool_calls": calls, **changes}


def test_an_answer_is_found_by_its_calls_however_their_json_is_spaced() -> None:
    memory = ToolMemory()
    memory.remember(known := answer("a"))
    assert memory.find(message("a")) is known
    assert memory.find(message("a", content=None)) is known
    assert memory.find(message("b")) is None
    assert memory.find({"role": "user", "content": "Hm."}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "Hm, hm."},
        {"tool_calls": message("a")["tool_calls"][:1]},
        {"tool_calls": message("a")["tool_calls"][::-1]},
        {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": 2}'}}] * 2},
        {"role": "user"},
    ],
)
def test_a_message_that_was_changed_is_not_replayed(changes: dict[str, Any]) -> None:
    memory = ToolMemory()
    memory.remember(answer("a"))
    assert memory.find(message("a", **changes)) is None


def test_the_least_recently_used_answers_are_forgotten() -> None:
    memory = ToolMemory(max_answers=2)
    for call_id in ("a", "b"):
        memory.remember(answer(call_id))
    assert memory.find(message("a")) is not None
    memory.remember(answer("c"))
    found = [memory.find(message(call_id)) is not None for call_id in ("a", "b", "c")]
    assert found == [True, False, True]
    assert len(memory) == 2


def test_memory_is_bounded_in_bytes_and_counts_replaced_answers_once() -> None:
    size = answer("a", size=1000).bytes
    memory = ToolMemory(max_bytes=3 * size)
    for call_id in "aaabcde":
        memory.remember(answer(call_id, size=1000))
        assert memory.bytes == len(memory) * size <= 3 * size
    assert len(memory) == 3
    memory.remember(answer("z", size=100_000))
    assert (len(memory), memory.bytes) == (0, 0)


def test_only_answers_with_calls_are_kept() -> None:
    memory = ToolMemory()
    keep = memory.keeper("The prompt.\n")
    written = WrittenAnswer(
        tokens=[5, 6], raw="raw", after_thought=0, parts=AnswerParts(text="raw")
    )
    keep(written)
    assert len(memory) == 0
    calls = (CallDelta(index=0, id="a", name="f"), CallDelta(index=0, arguments="{}"))
    keep(replace(written, parts=AnswerParts(text="Hm.", calls=calls)))
    called = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
    found = memory.find(message("a", tool_calls=called))
    assert found is not None
    assert (list(found.tokens), found.prompt_end) == ([5, 6], "The prompt.\n")


def test_an_answer_whose_calls_end_inside_its_thought_is_not_kept() -> None:
    calls = (CallDelta(index=0, id="a", name="f"), CallDelta(index=0, arguments="{}"))
    for after_thought, kept in ((2, 1), (3, 0), (4, 0)):
        memory = ToolMemory()
        memory.keeper("")(
            WrittenAnswer(
                tokens=[5], raw="raw", after_thought=after_thought, parts=AnswerParts(calls=calls)
            )
        )
        assert len(memory) == kept


def test_the_last_200_characters_of_a_prompt_are_kept() -> None:
    memory = ToolMemory()
    calls = (CallDelta(index=0, id="a", name="f"), CallDelta(index=0, arguments="{}"))
    parts = AnswerParts(thought="Why?", text="Hm.", calls=calls)
    keep = memory.keeper("x" + "y" * 200)
    keep(WrittenAnswer(tokens=[5], raw="raw", after_thought=1, parts=parts))
    called = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]
    found = memory.find(message("a", tool_calls=called))
    assert found is not None
    assert found.prompt_end == "y" * 200
    assert (found.raw, found.after_thought, found.thought, found.text) == ("raw", 1, "Why?", "Hm.")


@pytest.mark.parametrize(
    "calls",
    [
        [{**message("a")["tool_calls"][0], "id": "b"}, message("a")["tool_calls"][1]],
        [message("a")["tool_calls"][0], {**message("a")["tool_calls"][1], "id": "other"}],
        [message("a")["tool_calls"][0], {"id": "a-2", "function": "g"}],
        [message("a")["tool_calls"][0], {"id": "a-2", "function": {"name": "h"}}],
        [*message("a")["tool_calls"], {"id": "c", "function": {"name": "f"}}],
    ],
)
def test_each_call_must_be_the_one_that_was_made(calls: list[Any]) -> None:
    memory = ToolMemory()
    memory.remember(answer("a"))
    assert memory.find(message("a", tool_calls=calls)) is None


def test_every_character_and_token_of_an_answer_counts_four_bytes() -> None:
    known = answer("a")
    for more in (
        replace(known, raw=known.raw + "x"),
        replace(known, thought="x"),
        replace(known, text=known.text + "x"),
        replace(known, tokens=(1, 2)),
        replace(known, calls=(replace(known.calls[0], name="ff"), known.calls[1])),
        replace(known, calls=(replace(known.calls[0], arguments='{"a": 12}'), known.calls[1])),
    ):
        assert more.bytes - known.bytes == 4
    assert known.bytes - replace(known, calls=known.calls[:1]).bytes > 4 * len('g{"broken')
