"""The items of /v1/responses, and their conversion to chat messages.

The items of one answer (thoughts, text, calls) become one message of the assistant.
"""

import base64
import binascii
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from headroom.server.invalid_bodies import short, wrong_type
from headroom.server.offered_tools import OfferedTools
from headroom.server.openai_tools import arguments_text
from headroom.server.refusals import RefusalError
from headroom.server.responses_tools import ResponsesToolBody
from headroom.server.schemas import LEFT_OUT_PART, Body
from headroom.text.conversation import INPUT

ITEM_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
OUTPUT_ITEMS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# What OpenAI's servers did in earlier turns; the model does not see these items.
SKIPPED = ("web_search_call", "image_generation_call", "tool_search_call", "tool_search_output")
ID_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
# Begins `encrypted_content`. Thoughts are only encoded there, because they are sent as text, too.
OPAQUE = "headroom:"


class PartBody(Body):
    """One part of an item's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """The text of the part; None if it has none."""
        if self.type == "refusal":
            return self.refusal
        return self.text if self.type in TEXT_PARTS else None


def _as_parts(value: object) -> object:
    """Return content as a list of parts; a text becomes one part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is not None and not isinstance(value, list):
        raise wrong_type("a text or a list of parts")
    return value


Parts = Annotated[
    Annotated[list[PartBody], Field(fail_fast=True)] | None, BeforeValidator(_as_parts)
]


class ItemBody(Body):
    """One item: a message, a thought, a call, its output, or a reference to an earlier item."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None  # left out: a message
    id: str | None = None
    role: str | None = None
    content: Parts = None
    summary: Parts = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Annotated[str | None, BeforeValidator(arguments_text)] = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: Parts = None
    tools: Annotated[list[ResponsesToolBody], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "ItemBody":
        if self.kind == "function_call" and self.arguments is None:
            self.arguments = "{}"
        for field in _REQUIRED.get(self.kind, ()):
            if getattr(self, field) is None:
                raise ValueError(f"an item of type '{self.kind}' needs `{field}`")
        if self.kind == "message" and self.role not in ITEM_ROLES:
            raise ValueError(f"there is no role {short(self.role)!r}, only {', '.join(ITEM_ROLES)}")
        if self.kind not in (*_REQUIRED, *SKIPPED):
            raise ValueError(f"items of type {short(self.kind)!r} are not supported")
        return self

    @property
    def kind(self) -> str:
        """The type of the item; an item with only an id is a reference to another."""
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.id is not None else "message"

    def shown(self) -> dict[str, Any]:
        """Return the item as the API lists it, with an id and with types of parts."""
        item = self.model_dump(exclude_unset=True)
        item["type"] = self.kind
        if self.id is None:
            item["id"] = f"{ID_PREFIXES.get(self.kind, 'item')}_{uuid.uuid4().hex}"
        if self.kind in ("message", *CALLS, *OUTPUT_ITEMS):
            item["status"] = item.get("status") or "completed"
        if self.kind == "message":
            item["content"] = [_typed(part, self.role) for part in item.get("content") or ()]
        for part in item.get("output") or ():
            part["type"] = "input_text" if part["type"] == "text" else part["type"]
        return item


def _typed(part: dict[str, Any], role: str | None) -> dict[str, Any]:
    """Return a text part with the type that the API uses for the role."""
    if part["type"] not in ("text", "input_text", "output_text"):
        return part
    if role == "assistant":
        return {"annotations": [], **part, "type": "output_text"}
    return {**part, "type": "input_text"}


_REQUIRED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name"),
    "custom_tool_call": ("call_id", "name", "input"),
    "local_shell_call": ("call_id", "action"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "local_shell_call_output": ("output",),
    "item_reference": ("id",),
    "additional_tools": ("tools",),
}


def input_items(value: object) -> object:
    """Return the input as a list of items; a text becomes a message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if value is not None and not isinstance(value, list):
        raise wrong_type("a text or a list of items")
    return value


def hide(thought: str) -> str:
    """Return a thought as `encrypted_content`."""
    return OPAQUE + base64.b64encode(thought.encode()).decode()


def read_hidden(text: str | None) -> str:
    """Return the thought in an `encrypted_content`; "" if another server wrote it."""
    if text is None or not text.startswith(OPAQUE):
        return ""
    try:
        return base64.b64decode(text.removeprefix(OPAQUE), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def make_messages(
    earlier: Sequence[ItemBody],  # of the responses before this one
    given: Sequence[ItemBody],
    instructions: str | None,
    tools: OfferedTools,
) -> list[dict[str, Any]]:
    """Return items as the messages of a chat."""
    chat = _MessageBuilder(tools)
    if instructions:
        chat.add_system(instructions)
    for item in earlier:
        chat.add(item, "previous_response_id")
    for index, item in enumerate(given):
        chat.add(item, f"input[{index}]")
    return chat.messages


class _MessageBuilder:
    """Builds the messages of a chat from items, one after the other."""

    def __init__(self, tools: OfferedTools) -> None:
        self.messages: list[dict[str, Any]] = []
        self._tools = tools
        self._called: dict[str, str] = {}  # names of the called tools for the model, by call id

    def add(self, item: ItemBody, where: str) -> None:
        """Add one item; `where` is its place in the body, which errors name."""
        if item.kind == "message":
            self._add_message(item, where)
        elif item.kind == "reasoning":
            self._add_thought(item)
        elif item.kind in CALLS:
            self._add_call(item)
        elif item.kind in OUTPUT_ITEMS:
            self._add_output(item, where)

    def add_system(self, text: str) -> None:
        """Add a system message; those at the beginning become one, as templates expect."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def _add_message(self, item: ItemBody, where: str) -> None:
        assert item.role is not None
        text = "\n".join(_texts(item.content, f"{where}.content"))
        role = ITEM_ROLES[item.role]
        if role == "system":
            self.add_system(text)
        elif role == "user":
            self.messages.append({"role": role, "content": text})
        else:
            turn = self._assistant()
            turn["content"] = f"{turn['content']}\n\n{text}" if turn["content"] else text

    def _add_thought(self, item: ItemBody) -> None:
        parts = item.content or item.summary or ()
        thought = "\n\n".join(part.words for part in parts if part.words)
        thought = thought or read_hidden(item.encrypted_content)
        if not thought:
            return
        turn = self._assistant()
        if turn["content"] or "tool_calls" in turn:  # a thought begins a new answer
            turn = self._new_assistant()
        known = turn.get("reasoning_content")
        turn["reasoning_content"] = f"{known}\n\n{thought}" if known else thought

    def _add_call(self, item: ItemBody) -> None:
        assert item.call_id is not None
        if item.kind == "local_shell_call":
            name, arguments = "local_shell", _json(item.action)
        else:
            assert item.name is not None
            name = self._tools.model_name(item.name, item.namespace)
            arguments = _json({INPUT: item.input}) if item.arguments is None else item.arguments
        function = {"name": name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)
        self._called[item.call_id] = name

    def _add_output(self, item: ItemBody, where: str) -> None:
        call_id = item.call_id or item.id or ""
        if call_id not in self._called:
            raise RefusalError(
                400,
                "invalid_value",
                f"This output answers the call {short(call_id)!r}, which is not in the input.",
                hint="Send the item of the call, too, or `previous_response_id`.",
                param=where,
            )
        words = [
            LEFT_OUT_PART.format(kind=part.type) if part.words is None else part.words
            for part in item.output or ()
        ]
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": self._called[call_id],
                "content": "\n".join(words),
            }
        )

    def _assistant(self) -> dict[str, Any]:
        """Return the last message if it is the assistant's; else add one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._new_assistant()

    def _new_assistant(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _texts(parts: Iterable[PartBody] | None, where: str) -> Iterable[str]:
    for index, part in enumerate(parts or ()):
        if part.words is None:
            known = part.type in (*TEXT_PARTS, "refusal")
            raise RefusalError(
                400,
                "invalid_value",
                "A text part has no text."
                if known
                else f"Parts of type {short(part.type)!r} are not supported, only text.",
                param=f"{where}[{index}]",
            )
        yield part.words


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
