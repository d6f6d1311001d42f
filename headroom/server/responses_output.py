"""Output of /v1/responses: the deltas of an answer become items, and events that announce them."""

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pydantic_core import from_json

from headroom.answers import AnswerDelta, AnswerToken
from headroom.server.responses_input import hide
from headroom.server.responses_tools import INPUT, OfferedTool, OfferedTools
from headroom.text.answer_parser import CallDelta

Event = dict[str, Any]  # without its sequence number
Logprobs = list[dict[str, Any]]
# The field that holds what a tool is called with, and the beginning of its events' types.
CALL_EVENTS = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HIGH, LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)  # halves of a character in JSON


class OutputItem(Protocol):
    """An item while the model writes it."""

    item: dict[str, Any]

    def begin(self) -> Iterator[Event]:
        """Yield the events between the item's first and its first delta."""

    def end(self) -> Iterator[Event]:
        """Yield the events between the last delta and the item's last; complete the item."""


class OutputWriter:
    """Writes the items of one answer; each method yields the events that it gives rise to."""

    def __init__(
        self,
        tools: OfferedTools,
        *,
        shows_thoughts: bool = True,
        summarises: bool = False,  # thoughts are also sent as summary, for clients that show those
        hides: bool = False,  # thoughts are also sent as `encrypted_content`
        logprobs: Callable[[Sequence[AnswerToken]], Logprobs] = lambda tokens: [],
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._shows_thoughts = shows_thoughts
        self._summarises = summarises
        self._hides = hides
        self._logprobs = logprobs
        self._open: OutputItem | None = None
        self._blank = ""  # white space that begins a message only if text follows
        self._call = -1  # index of the open call

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        """Take the next delta."""
        if delta.thought and self._shows_thoughts:
            yield from self._add_thought(delta.thought)
        if delta.text:
            yield from self._add_text(delta.text, delta.shown_tokens)
        for call in delta.calls:
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """End the open item with a status; an answer without any item gets an empty message."""
        if not self.items:
            blank = self._blank
            yield from self._begin(MessageItem())
            yield from self._add_text(blank, ())
        yield from self._end(status)

    def _add_thought(self, thought: str) -> Iterator[Event]:
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(summarises=self._summarises, hides=self._hides)
            yield from self._begin(item)
        assert isinstance(self._open, ReasoningItem)
        yield from self._placed(self._open.add(thought))

    def _add_text(self, text: str, tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        if not isinstance(self._open, MessageItem):
            text = self._blank + text
            if text.isspace():
                self._blank = text
                return
            yield from self._begin(MessageItem())
        assert isinstance(self._open, MessageItem)
        if text:
            yield from self._placed(self._open.add(text, self._logprobs(tokens)))

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if not isinstance(self._open, CallItem) or call.index != self._call:
            self._call = call.index
            yield from self._begin(CallItem(self._tools.called(call.name), call.id))
        assert isinstance(self._open, CallItem)
        yield from self._placed(self._open.add(call.arguments))

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self._end("completed")
        self._open, self._blank = item, ""
        self.items.append(item.item)
        yield self._item_event("response.output_item.added")
        yield from self._placed(item.begin())

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._placed(self._open.end())
        if "status" in self._open.item:
            self._open.item["status"] = status
        yield self._item_event("response.output_item.done")
        self._open = None

    def _item_event(self, kind: str) -> Event:
        place = len(self.items) - 1
        # The item goes on changing; an event shows it as it is now.
        return {"type": kind, "output_index": place, "item": dict(self.items[-1])}

    def _placed(self, events: Iterator[Event]) -> Iterator[Event]:
        """Add to events where their item is."""
        where = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        for event in events:
            yield {**event, **where}


class MessageItem:
    """A message: the text of the answer."""

    def __init__(self) -> None:
        self.item: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._texts: list[str] = []
        self._logprobs: Logprobs = []

    def begin(self) -> Iterator[Event]:
        """Yield the event that announces the text."""
        yield part_event("added", _text_part("", []))

    def add(self, text: str, logprobs: Logprobs) -> Iterator[Event]:
        """Yield the event that adds text."""
        self._texts.append(text)
        self._logprobs += logprobs
        yield {
            "type": "response.output_text.delta",
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }

    def end(self) -> Iterator[Event]:
        """Yield the events that repeat the whole text."""
        text = "".join(self._texts)
        part = _text_part(text, self._logprobs)
        yield {
            "type": "response.output_text.done",
            "content_index": 0,
            "text": text,
            "logprobs": self._logprobs,
        }
        yield part_event("done", part)
        self.item["content"] = [part]


class ReasoningItem:
    """A thought."""

    def __init__(self, *, summarises: bool, hides: bool) -> None:
        self.item: dict[str, Any] = {
            "id": new_id("rs"),
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
            "encrypted_content": None,
        }
        self._summarises = summarises
        self._hides = hides
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        """Yield the events that announce the thought."""
        if self._summarises:
            yield _summary_event("part.added", part=_summary_part(""))
        yield part_event("added", _thought_part(""))

    def add(self, text: str) -> Iterator[Event]:
        """Yield the events that add to the thought."""
        self._texts.append(text)
        if self._summarises:
            yield _summary_event("text.delta", delta=text)
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def end(self) -> Iterator[Event]:
        """Yield the events that repeat the whole thought."""
        text = "".join(self._texts)
        if self._summarises:
            yield _summary_event("text.done", text=text)
            yield _summary_event("part.done", part=_summary_part(text))
            self.item["summary"] = [_summary_part(text)]
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": text}
        yield part_event("done", _thought_part(text))
        self.item["content"] = [_thought_part(text)]
        if self._hides:
            self.item["encrypted_content"] = hide(text)


class CallItem:
    """A call of a function or of a custom tool."""

    def __init__(self, called: OfferedTool, call_id: str) -> None:
        custom = called.kind == "custom"
        self._input = InputText() if custom else None
        self._field = "input" if custom else "arguments"
        self._event = (
            f"response.{'custom_tool_call_input' if custom else 'function_call_arguments'}"
        )
        self._pieces: list[str] = []
        self.item: dict[str, Any] = {
            "id": new_id("ctc" if custom else "fc"),
            "type": "custom_tool_call" if custom else "function_call",
            "status": "in_progress",
            "call_id": call_id,
            **called.call_fields(),
            self._field: "",
        }

    def begin(self) -> Iterator[Event]:
        """Yield nothing: the item itself has the name."""
        yield from ()

    def add(self, arguments: str) -> Iterator[Event]:
        """Yield the event that adds to the arguments; of a custom tool, to its text."""
        self._pieces.append(arguments)
        piece = arguments if self._input is None else self._input.push(arguments)
        if piece:
            yield {"type": f"{self._event}.delta", "delta": piece}

    def end(self) -> Iterator[Event]:
        """Yield the event that repeats the whole arguments."""
        text = "".join(self._pieces)
        if self._input is not None:
            text = self._input.whole(text)
        yield {"type": f"{self._event}.done", self._field: text}
        self.item[self._field] = text


class InputText:
    """Reads the text of a custom tool from the JSON of its function's only argument.

    Pieces that are not such an object give nothing; the whole JSON is the text then.
    """

    def __init__(self) -> None:
        self._head = ""  # what came before the text
        self._tail = ""  # an escape sequence that is not whole yet
        self._texts: list[str] = []
        self._state = "head"  # then "text", then "end"; "other" where the JSON is not as expected

    def push(self, piece: str) -> str:
        """Take the next piece of JSON and return what it adds to the text."""
        if self._state == "head":
            self._head += piece
            piece = self._read_head()
        if self._state != "text":
            return ""
        text = self._read_text(self._tail + piece)
        self._texts.append(text)
        return text

    def whole(self, arguments: str) -> str:
        """Return the whole text; `arguments` is all of the JSON."""
        if self._state in ("text", "end"):
            return "".join(self._texts)
        try:
            value = from_json(arguments)
        except ValueError:
            return arguments
        text = value.get(INPUT) if isinstance(value, dict) else None
        return text if isinstance(text, str) else arguments

    def _read_head(self) -> str:
        """Look for the beginning of the text; return what comes after it."""
        rest = self._head
        for mark in ("{", f'"{INPUT}"', ":", '"'):
            rest = rest.lstrip()
            if not rest.startswith(mark):
                if not mark.startswith(rest):
                    self._state = "other"
                return ""
            rest = rest.removeprefix(mark)
        self._state = "text"
        return rest

    def _read_text(self, coded: str) -> str:
        """Return the characters of a part of a JSON text; an unfinished escape is kept."""
        text, at, self._tail = "", 0, ""
        while at < len(coded):
            char = coded[at]
            if char == '"':
                self._state = "end"
                break
            if char != "\\":
                text, at = text + char, at + 1
                continue
            escaped = _read_escape(coded[at:])
            if escaped is None:
                self._tail = coded[at:]
                break
            text, at = text + escaped[0], at + escaped[1]
        return text


def _read_escape(coded: str) -> tuple[str, int] | None:
    """Return the character of the escape that a text begins with, and its length; None if cut."""
    if len(coded) < 2:
        return None
    if coded[1] != "u":
        return ESCAPES.get(coded[1], coded[1]), 2
    if len(coded) < 6:
        return None
    first = _code(coded[2:6])
    if first not in HIGH:
        return chr(first) if first not in LOW else "\ufffd", 6
    if len(coded) < 12 and "\\u".startswith(coded[6:8]):
        return None
    second = _code(coded[8:12]) if coded[6:8] == "\\u" else 0
    if second not in LOW:
        return "\ufffd", 6
    return chr(0x10000 + ((first - HIGH.start) << 10) + (second - LOW.start)), 12


def _code(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD


def new_id(prefix: str) -> str:
    """Return a new id of an item or a response."""
    return f"{prefix}_{uuid.uuid4().hex}"


def replay(items: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Yield the events of finished items, with one delta for each text."""
    for place, item in enumerate(items):
        where = {"output_index": place, "item_id": item["id"]}
        begun = {**item, "status": "in_progress"} if "status" in item else dict(item)
        for field in ("content", "summary"):
            begun |= {field: []} if field in item else {}
        for field in CALL_EVENTS:
            begun |= {field: ""} if field in item else {}
        yield {"type": "response.output_item.added", "output_index": place, "item": begun}
        for event in _replay_inside(item):
            yield {**event, **where}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _replay_inside(item: dict[str, Any]) -> Iterator[Event]:
    for part in item.get("summary", ()):
        text = part["text"]
        yield _summary_event("part.added", part=_summary_part(""))
        yield _summary_event("text.delta", delta=text)
        yield _summary_event("text.done", text=text)
        yield _summary_event("part.done", part=part)
    for part in item.get("content", ()):
        name, text = f"response.{part['type']}", part["text"]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": ""} | ({"logprobs": []} if more else {})
        yield part_event("added", empty)
        yield {"type": f"{name}.delta", "content_index": 0, "delta": text, **more}
        yield {"type": f"{name}.done", "content_index": 0, "text": text, **more}
        yield part_event("done", part)
    for field, name in (
        ("arguments", "function_call_arguments"),
        ("input", "custom_tool_call_input"),
    ):
        if field in item:
            yield {"type": f"response.{name}.delta", "delta": item[field]}
            yield {"type": f"response.{name}.done", field: item[field]}


def part_event(what: str, part: dict[str, Any]) -> Event:
    """Return the event that a part of the content begins ("added") or ends ("done")."""
    return {"type": f"response.content_part.{what}", "content_index": 0, "part": part}


def _summary_event(what: str, **fields: Any) -> Event:
    return {"type": f"response.reasoning_summary_{what}", "summary_index": 0, **fields}


def _text_part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def count_json_bytes(value: object) -> int:
    """Return the bytes that a value takes as JSON."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
