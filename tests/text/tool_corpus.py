"""Answers with tool calls as models write them: 200 of each family, the same in every run."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headroom.text.conversation import Tool

Call = tuple[str, dict[str, Any]]  # name and arguments

TOOLS = (
    Tool(
        name="read_file",
        parameters={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "offset": {"type": "integer"},
                "limit": {"type": ["integer", "null"]},
            },
            "required": ["path"],
        },
    ),
    Tool(
        name="edit",
        parameters={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "old": {"type": "string"},
                "new": {"type": "string"},
                "all": {"type": "boolean"},
            },
        },
    ),
    Tool(
        name="search-web",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "sites": {"type": "array", "items": {"type": "string"}},
                "filter": {"type": "object"},
                "score": {"type": "number"},
            },
        },
    ),
    Tool(name="list_tools", parameters={"type": "object", "properties": {}}),
)
_STRINGS = (
    "src/main.py",
    "Köln, 10 °C – naïve café",
    "日本語のテキスト 👩‍💻 🇪🇺",
    'print("hello, \\"world\\"")\n\treturn {"a": [1, 2]}\n',
    "if a < b and c > d: pass  # <tool> & </tool",
    "C:\\temp\\new\\u0041",
    "",
    " leading and trailing ",
    "line one\r\nline two\n\n",
    "a,b:{c}[d]\u2028\x7f",
    "null",
    "12",
    "rm -rf / --no-preserve-root; echo '$HOME'",
)
_TEXTS = ("", "", "I'll look. ", "Gleich – 👍\n\n", "First:\n1. a < b\n2. {c}\n", "# Plan\n")
_THOUGHTS = ("The user wants a file.", "Hm … maybe {x}?\nI need <tools>.", "考えています。")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer, and what must be read from it."""

    answer: str
    calls: tuple[Call, ...] | None  # None: the answer is broken, and only cuts are compared
    text: str | None = None  # what remains besides white space; None: not known


def corpus(style: str, count: int = 200) -> list[Recorded]:
    """Return the recorded answers of a family."""
    return [_recorded(style, random.Random(f"{style} {number}")) for number in range(count)]


def _recorded(style: str, dice: random.Random) -> Recorded:
    before, after = dice.choice(_TEXTS), dice.choice(("", "", "", "\nDone.", " Ok?"))
    many = dice.choice((1, 1, 2, 3))
    calls = tuple(_call(dice, style) for _ in range(many))
    if style == "bare_json":
        before, after = "", ""
    written = WRITERS[style](calls, dice)
    answer = before + written + after
    text = before.strip() + (after if before.strip() else after.strip())
    kind = dice.random()
    if kind < 0.7:
        return Recorded(answer, calls, text.strip())
    if kind < 0.8:  # cut off
        return Recorded(answer[: dice.randrange(len(before), len(answer))], None)
    if kind < 0.9:  # no tool has this name
        wrong = tuple(("no_such_tool", arguments) for _, arguments in calls)
        return Recorded(before + WRITERS[style](wrong, dice) + after, ())
    place = dice.randrange(len(answer))  # something is missing or too much
    return Recorded(
        answer[:place] + dice.choice(("", '"', "}", "<", "\n]")) + answer[place + 1 :], None
    )


def _call(dice: random.Random, style: str) -> Call:
    tool = dice.choice(TOOLS)
    arguments: dict[str, Any] = {}
    for name, schema in tool.parameters["properties"].items():
        if dice.random() < 0.7:
            arguments[name] = _value(schema["type"], dice)
    if style == "plain_keys":  # its strings cannot have a quote token, and keys are plain
        arguments = dict(sorted(arguments.items()))
    return tool.name, arguments


def _value(kind: Any, dice: random.Random) -> Any:
    if isinstance(kind, list):
        kind = dice.choice(kind)
    if kind == "string":
        return dice.choice(_STRINGS)
    if kind == "integer":
        return dice.choice((0, -1, 42, 10**15))
    if kind == "number":
        return dice.choice((0.5, -2.25, 1e-07, 3))
    if kind == "boolean":
        return dice.random() < 0.5
    if kind == "array":
        return [dice.choice(_STRINGS) for _ in range(dice.randrange(3))]
    if kind == "object":
        return {"a": [1, {"b": dice.choice(_STRINGS), "c": None}], "d": {}, "e": True}
    return None


def _json(value: Any, dice: random.Random) -> str:
    """Write JSON in one of the ways that models do."""
    how = dice.choice(
        (
            {"ensure_ascii": False},
            {},
            {"separators": (",", ":")},
            {"indent": 2, "ensure_ascii": False},
        )
    )
    return json.dumps(value, **how)  # type: ignore[arg-type]


def _plain(value: Any, dice: random.Random) -> str:
    """Write a value between tags: strings as they are, Python's words as Jinja prints them."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | None):
        return dice.choice((str(value), json.dumps(value)))
    return _json(value, dice)


def _write_json_tags(calls: tuple[Call, ...], dice: random.Random) -> str:
    gap, between = dice.choice((("\n", "\n"), ("", ""), ("\n", "\n\n")))
    objects = (_json({"name": name, "arguments": values}, dice) for name, values in calls)
    return between.join(f"<tool_call>{gap}{entry}{gap}</tool_call>" for entry in objects)


def _write_function_tags(calls: tuple[Call, ...], dice: random.Random) -> str:
    blocks = []
    for name, values in calls:
        parameters = "".join(
            f"<parameter={key}>\n{_plain(value, dice)}\n</parameter>\n"
            for key, value in values.items()
        )
        block = f"<function={name}>\n{parameters}</function>"
        blocks.append(dice.choice((f"<tool_call>\n{block}\n</tool_call>", block)))
    return "\n".join(blocks)


def _write_argument_tags(calls: tuple[Call, ...], dice: random.Random) -> str:
    gap = dice.choice(("\n", ""))
    blocks = []
    for name, values in calls:
        arguments = "".join(
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_plain(value, dice)}</arg_value>{gap}"
            for key, value in values.items()
        )
        blocks.append(f"<tool_call>{name}{gap}{arguments}</tool_call>")
    return "\n".join(blocks)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(inner)}" for key, inner in value.items()) + "}"
    return str(value) if value is None else json.dumps(value)


def _write_gemma(calls: tuple[Call, ...], dice: random.Random) -> str:
    del dice
    return "".join(f"<|tool_call>call:{name}{_gemma(values)}<tool_call|>" for name, values in calls)


def _write_llama(calls: tuple[Call, ...], dice: random.Random) -> str:
    objects = [_json({"name": name, "parameters": values}, dice) for name, values in calls]
    return dice.choice(("", "<|python_tag|>")) + dice.choice(("; ", ";", ";\n")).join(objects)


def _write_mistral_list(calls: tuple[Call, ...], dice: random.Random) -> str:
    extra = {"id": "abcdefghi"} if dice.random() < 0.5 else {}
    entries = [{"name": name, "arguments": values, **extra} for name, values in calls]
    return f"[TOOL_CALLS]{dice.choice(('', ' '))}{_json(entries, dice)}"


def _write_mistral_args(calls: tuple[Call, ...], dice: random.Random) -> str:
    call_id = dice.choice(("[CALL_ID]aB3dE6gH9", ""))
    return "".join(
        f"[TOOL_CALLS]{name}{call_id}[ARGS]{_json(values, dice)}" for name, values in calls
    )


WRITERS: Mapping[str, Any] = {
    "json_tags": _write_json_tags,
    "function_tags": _write_function_tags,
    "argument_tags": _write_argument_tags,
    "plain_keys": _write_gemma,
    "bare_json": _write_llama,
    "json_list": _write_mistral_list,
    "named_json": _write_mistral_args,
}
