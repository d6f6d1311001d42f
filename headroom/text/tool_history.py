"""Converts messages with tool calls and results to the form that a chat template accepts."""

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from headroom.text.conversation import Message, Tool
from headroom.text.tool_formats import SHORT_ID, ToolFormat

Turn = dict[str, Any]  # a message, for a template

_LETTERS = string.ascii_letters + string.digits
_EXPLANATION = """You can call these functions:
{tools}

To call a function, write its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}
</tool_call>
You may write several calls. The results come in the next message, between <tool_response> and \
</tool_response>. If no function helps, answer without calling any."""


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """Return the tool calls of an assistant's message; entries without a function are left out."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, Sequence):
        return []
    return [call for call in calls if isinstance(call, Mapping) and "function" in call]


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object; text that is not a JSON object stays text."""
    function = call["function"]
    given = function.get("arguments") if isinstance(function, Mapping) else None
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def merged_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages with each message of calls joined to the assistant's message before it.

    Some clients send the text of an answer and each of its calls as separate messages.
    """
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if last.get("role") == "assistant" and calls_of(message):
            texts = [_text(last.get("content")), _text(message.get("content"))]
            merged[-1] = {
                **message,
                **last,
                "content": "\n\n".join(filter(None, texts)),
                "tool_calls": [*calls_of(last), *calls_of(message)],
            }
        else:
            merged.append(message)
    return merged


def history_turns(messages: Sequence[Message], form: ToolFormat) -> list[Turn]:
    """Return messages for a template that supports tools.

    Arguments, which clients send as JSON text, become objects. Results get the name of the function
    that was called. Ids are shortened for templates that accept only short ones.
    """
    names: dict[str, str] = {}  # of functions, by the id of the call
    turns = []
    for message in messages:
        turn = dict(message)
        if calls := calls_of(message):
            turn["tool_calls"] = [_template_call(call, form) for call in calls]
            names |= {str(call.get("id")): call["function"]["name"] for call in turn["tool_calls"]}
        elif not turn.get("tool_calls", True):
            del turn["tool_calls"]  # some templates take even an empty list for calls
        if turn.get("role") == "tool":
            if isinstance(turn.get("tool_call_id"), str):
                turn["tool_call_id"] = _template_id(turn["tool_call_id"], form)
                turn.setdefault("name", names.get(turn["tool_call_id"], "unknown"))
            if turn.get("content") is None:
                turn["content"] = ""
        turns.append(turn)
    return turns


def _template_call(call: Mapping[str, Any], form: ToolFormat) -> Turn:
    function = call["function"]
    name = function.get("name") if isinstance(function, Mapping) else None
    written = {"type": "function", "function": {"name": name, "arguments": arguments_of(call)}}
    if isinstance(call.get("id"), str):
        return {"id": _template_id(call["id"], form), **written}
    return written


def _template_id(call_id: str, form: ToolFormat) -> str:
    """Return an id that the template accepts; it depends on the given id only."""
    if not form.short_ids or SHORT_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode(errors="replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])


def with_objects(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which all arguments are objects, for templates that accept nothing else."""
    return [
        {**turn, "tool_calls": [_with_object(call) for call in turn["tool_calls"]]}
        if calls_of(turn)
        else turn
        for turn in turns
    ]


def _with_object(call: Turn) -> Turn:
    given = call["function"]["arguments"]
    arguments = given if isinstance(given, Mapping) else {"arguments": given}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with at most one call, each followed by its result.

    For templates that accept only one call in a message.
    """
    changed: list[Turn] = []
    moved: set[int] = set()  # places of results that were put after their calls
    for place, turn in enumerate(turns):
        if place in moved:
            continue
        calls = calls_of(turn)
        if len(calls) < 2:
            changed.append(turn)
            continue
        for number, call in enumerate(calls):
            content = turn.get("content") if number == 0 else ""
            changed.append({**turn, "content": content or "", "tool_calls": [call]})
            for later in range(place + 1, len(turns)):
                if turns[later].get("role") != "tool":
                    break
                if later not in moved and turns[later].get("tool_call_id") == call.get("id"):
                    changed.append(turns[later])
                    moved.add(later)
    return changed


def spelled_turns(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Turn]:
    """Return messages for a template without tools: calls and results become text.

    The system message explains the tools. Results that follow each other become one user message.
    """
    turns: list[Turn] = []
    for message in messages:
        turn = {
            key: value
            for key, value in message.items()
            if key not in ("tool_calls", "tool_call_id", "name")
        }
        if calls := calls_of(message):
            spelled = "\n".join(_spelled_call(call) for call in calls)
            turn["content"] = "\n".join(filter(None, [_text(turn.get("content")), spelled]))
        if turn.get("role") == "tool":
            content = f"<tool_response>\n{_text(turn.get('content'))}\n</tool_response>"
            if turns and turns[-1].get("results"):
                turns[-1]["content"] += f"\n{content}"
                continue
            turn = {"role": "user", "content": content, "results": True}
        turns.append(turn)
    turns = [{key: turn[key] for key in turn if key != "results"} for turn in turns]
    return _explained(turns, tools) if tools else turns


def _explained(turns: list[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """Return turns with an explanation of the tools in the system message."""
    listed = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    text = _EXPLANATION.format(tools=listed)
    if turns and turns[0].get("role") == "system":
        first = {**turns[0], "content": f"{_text(turns[0].get('content'))}\n\n{text}".lstrip()}
        return [first, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def without_system(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with the system message moved into the first user message."""
    if len(turns) < 2 or turns[0].get("role") != "system" or turns[1].get("role") != "user":
        return list(turns)
    text = f"{_text(turns[0].get('content'))}\n\n{_text(turns[1].get('content'))}"
    return [{**turns[1], "content": text}, *turns[2:]]


def _spelled_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name = function.get("name") if isinstance(function, Mapping) else None
    written = {"name": name, "arguments": arguments_of(call)}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))
