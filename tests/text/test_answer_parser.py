"""AnswerParser: thoughts and text are told apart, however the answer is cut into pieces."""

import pytest

from headroom.text.answer_parser import AnswerParser, AnswerParts, CallDelta, ToolCall, join_calls
from headroom.text.conversation import Tool
from headroom.text.reasoning import Reasoning
from headroom.text.tool_formats import ToolFormat, read_tagged

MARKS = Reasoning(start="<think>", end="</think>", start_id=1, end_id=2, opened=True)


def parse(text: str, pieces: list[str], *, in_thought: bool) -> AnswerParts:
    assert "".join(pieces) == text
    parser, parts = AnswerParser(MARKS, in_thought=in_thought), AnswerParts()
    for piece in pieces:
        parts += parser.push(piece)
    return parts + parser.finish()


@pytest.mark.parametrize(
    ("answer", "in_thought", "thought", "text"),
    [
        ("\nTwo and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
        ("<think>\nA thought.\n</think>\n\nFour.", False, "A thought.", "Four."),
        ("\n<think></think>Four.", False, "", "Four."),
        ("Four, </thin> or <think>.", False, "", "Four, </thin> or <think>."),
        ("<think>a</think>hi", True, "a", "hi"),
        ("\n<think>\n<think>a <think></think>hi", True, "a <think>", "hi"),
        ("<think><think>a</think>hi", False, "a", "hi"),
        ("<think></think>hi", True, "", "hi"),
        ("<thin </think>hi", True, "<thin", "hi"),
        ("\n<thi", True, "<thi", ""),
        ("<think>a</think>x<think>b</think>y", False, "a", "x<think>b</think>y"),
        ("A thought < 3 </ that never ends \n", True, "A thought < 3 </ that never ends", ""),
        ("\nFour.\n", False, "", "Four.\n"),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_thought_and_text_do_not_depend_on_the_pieces(
    answer: str, in_thought: bool, thought: str, text: str
) -> None:
    expected = AnswerParts(thought=thought, text=text)
    for first in range(len(answer) + 1):
        for second in range(first, len(answer) + 1):
            pieces = [answer[:first], answer[first:second], answer[second:]]
            assert parse(answer, pieces, in_thought=in_thought) == expected
    assert parse(answer, list(answer), in_thought=in_thought) == expected


def test_a_model_without_thoughts_gives_its_text_at_once_and_unchanged() -> None:
    parser = AnswerParser()
    assert parser.push("\n<think> 1\n") == AnswerParts(text="\n<think> 1\n")
    assert parser.held == 0
    assert parser.finish() == AnswerParts()


def test_calls_are_joined_by_their_index() -> None:
    deltas = [
        CallDelta(index=0, id="a", name="f", arguments='{"x'),
        CallDelta(index=1, id="b", name="g"),
        CallDelta(index=0, arguments='": 1}'),
        CallDelta(index=1, arguments="{}"),
    ]
    assert join_calls(deltas) == (
        ToolCall(id="a", name="f", arguments='{"x": 1}'),
        ToolCall(id="b", name="g", arguments="{}"),
    )


def test_text_that_the_prompt_has_begun_is_unchanged_and_has_no_thought() -> None:
    parser = AnswerParser(MARKS, begun=True)
    assert parser.push(" <think> 42\n") == AnswerParts(text=" <think> 42\n")
    assert parser.finish() == AnswerParts()


WRITE = Tool(name="write", parameters={"properties": {"text": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "a"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        (f"Hm. {CALL}\n", ["write"]),
        (f"Use <tool_call>.\n{CALL}\n{CALL}", ["write", "write"]),
        (f"Like {CALL}, perhaps?", []),
        ('Hm. <tool_call>{"name": "write", "arguments": {"te', []),
        (f"Hm. {CALL}</think>No.", []),
    ],
)
def test_calls_at_the_end_of_a_thought_that_never_ended_are_calls(
    answer: str, calls: list[str]
) -> None:
    form = ToolFormat(name="json_tags", starts=("<tool_call>",), read=read_tagged)
    for size in (1, 5, len(answer)):
        parser = AnswerParser(MARKS, in_thought=True, tools=[WRITE], format=form)
        parts = AnswerParts()
        for place in range(0, len(answer), size):
            parts += parser.push(answer[place : place + size])
        parts += parser.finish()
        found = join_calls(parts.calls)
        assert [call.name for call in found] == calls
        assert all(call.arguments == '{"text": "a"}' for call in found)
        assert parts.thought == answer.partition("</think>")[0].rstrip()


def test_without_tools_a_thought_has_no_calls() -> None:
    parser = AnswerParser(MARKS, in_thought=True)
    assert parser.push(f"Hm. {CALL}") + parser.finish() == AnswerParts(thought=f"Hm. {CALL}")


def test_text_that_waits_behind_a_call_is_held_to_the_character() -> None:
    form = ToolFormat(name="json_tags", starts=("<tool_call>",), read=read_tagged)
    parser = AnswerParser(MARKS, tools=[WRITE], format=form)
    parts = parser.push(f"Hm.{CALL} On <")
    assert (parts.text, len(join_calls(parts.calls)), parser.held) == ("Hm.", 1, len(" On <"))
    parts = parser.push("b")
    assert (parts.text, parser.held) == (" On <b", 0)
    assert parser.push(" ").text == ""
    assert parser.held == 1
    assert parser.finish().text == " "
    assert parser.held == 0


def test_only_the_characters_of_texts_are_text() -> None:
    form = ToolFormat(name="json_tags", starts=("<tool_call>",), read=read_tagged)
    answer = f"<think>a</think>Hm.{CALL} On."
    for pieces in ([answer], list(answer)):
        parser, parts = AnswerParser(MARKS, tools=[WRITE], format=form), AnswerParts()
        for piece in pieces:
            parts += parser.push(piece)
        parts += parser.finish()
        assert (parts.thought, parts.text) == ("a", "Hm. On.")
        shown = [at for at in range(len(answer)) if parser.is_text(at, at + 1)]
        assert "".join(answer[at] for at in shown) == "Hm. On."
        first = answer.index("Hm.")
        assert not parser.is_text(0, first)
        assert parser.is_text(0, first + 1)
        assert not parser.is_text(first + 3, first + 3 + len(CALL))
        assert not parser.is_text(first, first)
    plain = AnswerParser()
    plain.push("a")
    assert plain.is_text(5, 6)  # all of an answer without thoughts and calls
