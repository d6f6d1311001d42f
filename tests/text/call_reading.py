"""Reads answers with tool calls as tests do: whole, and cut at every place."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from headroom.text.answer_parser import AnswerParser, AnswerParts, join_calls
from headroom.text.conversation import Tool
from headroom.text.tool_formats import (
    ToolFormat,
    read_any,
    read_bare_json,
    read_marked_list,
    read_plain_keys,
    read_tagged,
)

TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "wind": {"type": "number"},
                "exact": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
                "near": {"type": "array", "items": {"type": "string"}},
                "box": {"$ref": "#/$defs/box"},
            },
            "$defs": {"box": {"type": "object"}},
        },
    ),
    Tool(name="write", parameters={"properties": {"text": {"type": "string"}}}),
    Tool(name="now"),
)
TAGS = ToolFormat(name="json_tags", starts=("<tool_call>", "<function="), read=read_tagged)
GEMMA = ToolFormat(name="plain_keys", starts=("<|tool_call>",), read=read_plain_keys)
LLAMA = ToolFormat(
    name="bare_json", starts=("<|python_tag|>",), read=read_bare_json, begins_bare=True
)
MISTRAL = ToolFormat(
    name="named_json", starts=("[TOOL_CALLS]",), read=read_marked_list, short_ids=True
)
ANY = ToolFormat(
    name="json_tags",
    starts=("<tool_call>", "<function="),
    read=read_any,
    begins_bare=True,
    native=False,
)


@dataclass(frozen=True)
class Read:
    """The parts of an answer."""

    text: str
    calls: list[tuple[str, str]]  # name and arguments, as text


def read(form: ToolFormat, pieces: list[str], tools: Sequence[Tool] = TOOLS) -> Read:
    parser, parts = AnswerParser(tools=tools, format=form), AnswerParts()
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    assert parser.held == 0
    calls = join_calls(parts.calls)
    assert all(call.id for call in calls)
    return Read(parts.text, [(call.name, call.arguments) for call in calls])


def read_in_all_ways(form: ToolFormat, answer: str, tools: Sequence[Tool] = TOOLS) -> Read:
    """Read an answer whole, character by character and cut once at each place."""
    whole = read(form, [answer], tools)
    assert read(form, list(answer), tools) == whole
    for place in range(len(answer)):
        assert read(form, [answer[:place], answer[place:]], tools) == whole
    return whole


def check(
    form: ToolFormat,
    answer: str,
    text: str,
    *calls: tuple[str, object],
    tools: Sequence[Tool] = TOOLS,
) -> None:
    result = read_in_all_ways(form, answer, tools)
    assert result.text == text
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == list(calls)
