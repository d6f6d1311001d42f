"""Synthetic answers with tool calls: 200 in each format, the same in every run.

No real model wrote them. What real templates of these formats write is compared with what is read
by `test_call_parser_templates.py`.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headroom.text.conversation import Tool
from tests.text.tool_models import STYLES, rendered_answer

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
class SyntheticAnswer:
    """One answer, and what must be read from it."""

    answer: str
    calls: tuple[Call, ...] | None  # None: not certain, and only cuts are compared
    text: str | None = None  # what remains besides white space; None: not certain


def corpus(style: str, count: int = 200) -> list[SyntheticAnswer]:
    """Return synthetic answers in a format; they are the same in every run.

    Of four answers two are written by a chat template of the format (the template is what says how
    a call is spelled, not this file), one in other spellings that models use, and one has a mistake
    of the kinds that models make.
    """
    return [_answer(style, number) for number in range(count)]


def _answer(style: str, number: int) -> SyntheticAnswer:
    dice = random.Random(f"{style} {number}")
    many = 1 if style == "bare_json" else dice.choice((1, 1, 2, 3))
    calls = tuple(_call(dice, style) for _ in range(many))
    if number % 4 < 2:
        return _rendered(style, calls, dice)
    if number % 4 == 2:
        return _spelled(style, calls, dice)
    mistakes = [mistake for mistake in MISTAKES if style in mistake.styles]
    return mistakes[number // 4 % len(mistakes)].write(style, calls, dice)


def _rendered(style: str, calls: tuple[Call, ...], dice: random.Random) -> SyntheticAnswer:
    """Return an answer as a template of the format writes it into the history."""
    model = dice.choice([model for model, form in STYLES.items() if form == style])
    words = dice.choice(_TEXTS).strip()
    message = {
        "role": "assistant",
        "content": words,
        "tool_calls": [
            {"id": "aB3dE6gH9", "type": "function", "function": {"name": name, "arguments": values}}
            for name, values in calls
        ],
    }
    answer = rendered_answer(model, message)
    shown = words if words and words in answer else ""  # some templates show no text beside calls
    return SyntheticAnswer(answer, calls, shown)


def _spelled(style: str, calls: tuple[Call, ...], dice: random.Random) -> SyntheticAnswer:
    """Return an answer in one of the other spellings that models use."""
    before, after = dice.choice(_TEXTS), dice.choice(("", "", "", "\nDone.", " Ok?"))
    if style == "bare_json":
        before, after = "", ""
        calls += tuple(_call(dice, style) for _ in range(dice.choice((0, 1))))
    text = before.strip() + (after if before.strip() else after.strip())
    return SyntheticAnswer(before + WRITERS[style](calls, dice) + after, calls, text.strip())


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that models make in their calls."""

    write: Callable[[str, tuple[Call, ...], random.Random], SyntheticAnswer]
    styles: frozenset[str]  # the formats in which it is made


MISTAKES: list[Mistake] = []
_JSON_STYLES = ("json_tags", "bare_json", "json_list", "named_json")
_TAG_STYLES = ("json_tags", "function_tags", "argument_tags")
_NESTED = (
    *("<tool_call>", "</tool_call>x", "a</parameter>b", "<function=edit>", "</arg_value>;"),
    *("[TOOL_CALLS]", "[ARGS]{}", '{"name": "edit", "arguments": {}}', "<think>", "\n</function>"),
)


def _mistake(*styles: str) -> Callable[[Any], Any]:
    def add(write: Any) -> Any:
        MISTAKES.append(Mistake(write, frozenset(styles or STYLES.values())))
        return write

    return add


def _written(style: str, calls: tuple[Call, ...]) -> str:
    """Return calls as the first template of a format writes them."""
    return "".join(_blocks(style, calls))


def _blocks(style: str, calls: tuple[Call, ...]) -> list[str]:
    model = next(model for model, form in STYLES.items() if form == style)
    blocks = []
    for name, values in calls:
        function = {"name": name, "arguments": values}
        call = {"id": "aB3dE6gH9", "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        blocks.append(rendered_answer(model, message).strip("\n"))
    return blocks


@_mistake()
def _is_cut_off(style: str, calls: tuple[Call, ...], dice: random.Random) -> SyntheticAnswer:
    whole = f"{dice.choice(_TEXTS)}{_written(style, calls[:1])}"
    return SyntheticAnswer(whole[: dice.randrange(1, len(whole))], None)


@_mistake()
def _calls_an_unknown_tool(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    name, values = calls[0]
    return SyntheticAnswer(_written(style, ((f"{name}_{dice.randrange(9)}", values),)), ())


@_mistake()
def _has_a_wrong_character(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    whole = _written(style, calls[:1])
    place = dice.randrange(len(whole))
    wrong = dice.choice(("", '"', "}", "<", "\n]", "'", "\\"))
    return SyntheticAnswer(whole[:place] + wrong + whole[place + 1 :], None)


@_mistake("json_tags", "function_tags", "plain_keys")
def _forgets_the_end_mark(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    end = "<tool_call|>" if style == "plain_keys" else "</tool_call>"
    *before, last = _blocks(style, calls)
    gap = dice.choice(("", "\n")) if style != "plain_keys" else ""
    return SyntheticAnswer(gap.join([*before, last.removesuffix(end)]), calls, "")


@_mistake("function_tags")
def _forgets_the_start_mark(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    blocks = [block.removeprefix("<tool_call>\n") for block in _blocks(style, calls)]
    return SyntheticAnswer(dice.choice(_TEXTS) + "\n".join(blocks), calls)


@_mistake(*_TAG_STYLES)
def _repeats_the_end_mark(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    gap = dice.choice(("", "\n"))
    return SyntheticAnswer(f"{_written(style, calls)}{gap}</tool_call>", calls, "")


@_mistake(*_TAG_STYLES, "plain_keys", "named_json")
def _writes_calls_without_a_break(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    many = (*calls, *(_call(dice, style) for _ in range(2)))
    return SyntheticAnswer(_written(style, many), many, "")


@_mistake("json_tags")
def _writes_several_objects_between_one_pair_of_tags(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    many = (*calls, _call(dice, style))
    gap = dice.choice(("\n", "", " "))
    objects = gap.join(_json({"name": name, "arguments": values}, dice) for name, values in many)
    return SyntheticAnswer(f"<tool_call>\n{objects}\n</tool_call>", many, "")


@_mistake(*_JSON_STYLES)
def _writes_numbers_and_booleans_as_strings(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    edits = dice.random() < 0.5
    key, value, other = ("all", True, "new") if edits else ("offset", dice.randrange(99), "path")
    name = "edit" if edits else "read_file"
    written = _written(style, ((name, {key: json.dumps(value), other: "12"}),))
    return SyntheticAnswer(written, ((name, {key: value, other: "12"}),), "")


@_mistake(*_TAG_STYLES, "plain_keys")
def _writes_text_between_calls(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    first, second = _blocks(style, (calls[0], calls[-1]))
    words = dice.choice(("Then:", "und dann – 👍", "1 < 2; {x}", "```"))
    gap = dice.choice(("\n", " ", "\n\n"))
    return SyntheticAnswer(f"{first}{gap}{words}{gap}{second}", (calls[0], calls[-1]), words)


@_mistake(*_TAG_STYLES, "plain_keys", "json_list", "named_json")
def _puts_calls_into_a_fence(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    fence = dice.choice(("```", "```json", "```xml"))
    answer = f"{fence}\n{_written(style, calls[:1])}\n```"
    return SyntheticAnswer(answer, calls[:1], None)


@_mistake(*_TAG_STYLES, *_JSON_STYLES)
def _writes_markup_in_a_string(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    values = {"path": dice.choice(_NESTED), "new": dice.choice(_NESTED) + dice.choice(_STRINGS)}
    call = ("edit", values)
    return SyntheticAnswer(_written(style, (call,)), (call,), "")


@_mistake(*_JSON_STYLES)
def _writes_a_comma_too_many(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    call = ("read_file", {"path": dice.choice(_STRINGS), "offset": dice.randrange(99)})
    whole = _written(style, (call,))
    place = whole.rindex({"named_json": "}", "json_list": '}, "id"'}.get(style, "}}"))
    return SyntheticAnswer(f"{whole[:place]},{whole[place:]}", (call,), "")


@_mistake("json_tags", "bare_json", "json_list")
def _writes_arguments_as_a_text(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    name, values = calls[0]
    inner = json.dumps(values, ensure_ascii=dice.random() < 0.5)
    key = "parameters" if style == "bare_json" else "arguments"
    entry = json.dumps({"name": name, key: inner}, ensure_ascii=False)
    whole = {
        "json_tags": f"<tool_call>\n{entry}\n</tool_call>",
        "bare_json": entry,
        "json_list": f"[TOOL_CALLS][{entry}]",
    }[style]
    return SyntheticAnswer(whole, calls[:1], "")


@_mistake(*_JSON_STYLES)
def _writes_python_instead_of_json(
    style: str, calls: tuple[Call, ...], dice: random.Random
) -> SyntheticAnswer:
    name, values = calls[0]
    key = "parameters" if style == "bare_json" else "arguments"
    entry = str({"name": name, key: values})
    whole = {
        "json_tags": f"<tool_call>\n{entry}\n</tool_call>",
        "bare_json": entry,
        "json_list": f"[TOOL_CALLS][{entry}]",
        "named_json": f"[TOOL_CALLS]{name}[ARGS]{values}",
    }[style]
    return SyntheticAnswer(whole, None)


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
