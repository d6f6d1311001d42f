"""CallParser on 200 synthetic answers in each format: cut at every byte, the calls are the same."""

import codecs
import json
from collections.abc import Iterable
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.text.answer import AnswerText
from headroom.text.answer_parser import AnswerParser, AnswerParts, ToolCall, join_calls
from headroom.text.reasoning import Reasoning
from headroom.text.tool_formats import ToolFormat, find_tool_format
from tests.text.tool_corpus import TOOLS, WRITERS, corpus
from tests.text.tool_models import (
    NATIVE_MODELS,
    STYLES,
    rendered_answer,
    tool_template,
    tool_tokenizer,
)

MODEL_OF = {style: model for model, style in reversed(STYLES.items())}
THINK = Reasoning(start="<think>", end="</think>", start_id=0, end_id=1, opened=True)


def form_of(style: str) -> ToolFormat:
    model = MODEL_OF[style]
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    assert form.name == style
    return form


def read(
    form: ToolFormat, pieces: Iterable[str], reasoning: Reasoning | None = None
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the thought, the text, and name and arguments of each call."""
    parser = AnswerParser(reasoning, in_thought=reasoning is not None, tools=TOOLS, format=form)
    all_parts = [parser.push(piece) for piece in pieces]
    all_parts.append(parser.finish())
    assert parser.held == 0
    calls = join_calls(delta for parts in all_parts for delta in parts.calls)
    text = "".join(parts.text for parts in all_parts)
    thought = "".join(parts.thought for parts in all_parts)
    return thought, text, [(call.name, call.arguments) for call in calls]


def decoded(pieces: Iterable[bytes]) -> list[str]:
    """Return the characters that each piece of bytes completes, as a Detokenizer gives them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(piece) for piece in pieces]


@pytest.mark.parametrize("style", WRITERS)
def test_answers_give_the_same_calls_byte_by_byte(style: str) -> None:
    form = form_of(style)
    unsure = 0
    for sample in corpus(style):
        answer = sample.answer
        whole = read(form, [answer])
        if sample.calls is not None:
            calls = [(name, json.loads(arguments)) for name, arguments in whole[2]]
            assert calls == list(sample.calls), answer
        else:
            unsure += 1
        if sample.text is not None:
            assert whole[1].strip() == sample.text, answer
        assert read(form, decoded(bytes([byte]) for byte in answer.encode())) == whole, answer
    assert 5 < unsure < 40


def check_cuts(style: str, step: int) -> None:
    """Cut every answer in two, at every byte, and require the calls of the whole answer."""
    form = form_of(style)
    for sample in corpus(style)[::step]:
        whole, data = read(form, [sample.answer]), sample.answer.encode()
        for place in range(1, len(data)):
            pieces = decoded([data[:place], data[place:]])
            assert read(form, pieces) == whole, pieces


@pytest.mark.parametrize("style", WRITERS)
def test_answers_give_the_same_calls_wherever_they_are_cut_in_two(style: str) -> None:
    check_cuts(style, step=41)


@pytest.mark.slow
@pytest.mark.parametrize("style", WRITERS)
def test_all_answers_give_the_same_calls_wherever_they_are_cut_in_two(style: str) -> None:
    check_cuts(style, step=1)


@pytest.mark.parametrize("style", WRITERS)
def test_answers_come_the_same_through_tokens(style: str) -> None:
    """Marks are control tokens here, and every other byte is a token."""
    form, tokenizer = form_of(style), tool_tokenizer(MODEL_OF[style])
    for sample in corpus(style, 60):
        reader = AnswerText(tokenizer, parser=AnswerParser(tools=TOOLS, format=form))
        parts = [reader.push(token) for token in tokenizer.encode(sample.answer)]
        parts.append(reader.finish())
        text = "".join(part.text for part in parts)
        calls = join_calls(delta for part in parts for delta in part.calls)
        found = [(call.name, call.arguments) for call in calls]
        assert ("", text, found) == read(form, [sample.answer])


@pytest.mark.parametrize("style", WRITERS)
def test_thoughts_before_calls_stay_thoughts(style: str) -> None:
    form = form_of(style)
    for sample in corpus(style, 40):
        _, text, calls = read(form, [sample.answer])
        answer = f"\nA <tool_call> or {{}}?\n</think>\n\n{sample.answer}"
        for size in (1, 3, 7, len(answer)):
            pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
            thought, after, found = read(form, pieces, THINK)
            assert thought == "A <tool_call> or {}?"
            assert after.strip() == text.strip()
            assert found == calls


@pytest.mark.parametrize("model", NATIVE_MODELS)
def test_what_a_template_writes_is_read_back(model: str) -> None:
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    tried = 0
    for sample in corpus(form.name, 120):
        calls = sample.calls or ()
        if not calls or (form.name == "bare_json" and len(calls) > 1):
            continue
        written = [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": written}
        if any(name == "no_such_tool" for name, _ in calls):
            continue
        answer = rendered_answer(model, message)
        _, text, found = read(form, [answer])
        assert text.strip() == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == list(calls), answer
        tried += 1
    assert tried > 20


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<function=", "edit", ">", "<parameter=", "</parameter>"),
    *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\n", " ", "{", "}"),
    *('"name": ', '"edit"', ", ", '"arguments": ', '"parameters": ', "[", "]", "1", '"', "\\", "é"),
    *("<|tool_call>", "call:", "<tool_call|>", '<|"|>', ":", "<|python_tag|>", "; ", "path"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abcdefghi"),
    *("list_tools", "\\ud83d", "<", "nul", "-1e5"),
    *('{"name": "edit"', ', "note": "x"', ', "all": "true"', ', "arguments": {', '"id": ', "}}"),
    *('"type": ', '"function"'),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    style: str, fragments: list[str], cuts: list[int]
) -> None:
    form, answer = form_of(style), "".join(fragments)
    whole = read(form, [answer])
    places = [0, *sorted(place for place in cuts if place < len(answer)), len(answer)]
    pieces = [answer[start:end] for start, end in pairwise(places)]
    assert read(form, pieces) == whole
    assert read(form, list(answer)) == whole
    if not whole[2]:  # nothing vanishes where there is no call
        assert whole[1] == answer


WORDS = st.sampled_from(("edit", "list_tools", "3", "true", "a text", "", "</tool_call>"))
FIELDS = st.dictionaries(
    st.sampled_from(
        ("name", "function", "arguments", "parameters", "id", "type", "note", "path", "all", "bio")
    ),
    WORDS | st.integers() | st.none() | st.dictionaries(st.sampled_from(("path", "all")), WORDS),
    max_size=5,
)
BLOCKS = ("{}", "<tool_call>{}</tool_call>", "<tool_call>\n{}\n{}</tool_call></tool_call>")
BLOCKS += ("[TOOL_CALLS][{}, {}]", "<|python_tag|>{}; {}", "I look. <tool_call>{}", "{};{}")


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(("json_tags", "bare_json", "json_list", "any")),
    st.sampled_from(BLOCKS),
    st.lists(FIELDS, min_size=2, max_size=2),
    st.lists(st.integers(0, 300), max_size=6),
    st.integers(0, 300),
)
def test_no_value_of_json_vanishes_however_it_is_cut(
    style: str, block: str, objects: list[dict[str, Any]], cuts: list[int], end: int
) -> None:
    form = find_tool_format(tool_tokenizer("plain"), None) if style == "any" else form_of(style)
    # Each text is numbered, so that each can be looked for.
    numbers = count()

    def numbered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: numbered(inner) for key, inner in value.items()}
        is_text = isinstance(value, str) and value in ("a text", "")
        return f"{value}#{next(numbers)}" if is_text else value

    written = [numbered(entry) for entry in objects[: block.count("{}")]]
    answer = block.format(*map(json.dumps, written))[-end - 1 :]
    whole = read(form, [answer])
    places = [0, *sorted(place for place in cuts if place < len(answer)), len(answer)]
    assert read(form, [answer[start:end] for start, end in pairwise(places)]) == whole
    assert read(form, list(answer)) == whole
    shown = whole[1] + "".join(arguments for _, arguments in whole[2])
    for entry in written:
        for key, value in entry.items():
            texts = value.values() if isinstance(value, dict) else [value]
            for text in texts:
                if key != "id" and "#" in str(text) and text in answer:
                    assert text in shown
    if not whole[2]:
        assert whole[1] == answer


def test_arguments_of_a_call_are_valid_json_so_far() -> None:
    """Each piece of a whole call continues a JSON object, which is complete at the end."""
    for style in WRITERS:
        form = form_of(style)
        for sample in corpus(style, 30):
            if sample.calls is None:
                continue
            parser, parts = AnswerParser(tools=TOOLS, format=form), AnswerParts()
            for character in sample.answer:
                added = parser.push(character)
                for delta in added.calls:
                    assert bool(delta.name) != bool(delta.arguments)
                parts += added
            whole: tuple[ToolCall, ...] = join_calls((parts + parser.finish()).calls)
            assert all(isinstance(json.loads(call.arguments), dict) for call in whole)
