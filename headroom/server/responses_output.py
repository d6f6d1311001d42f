"""Output of /v1/responses: turns the deltas of an answer into items and their events."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headroom.answers import AnswerDelta, AnswerToken
from headroom.server.custom_input import InputText
from headroom.server.offered_tools import OfferedTool, OfferedTools
from headroom.server.openai_shared import scored_token
from headroom.server.responses_input import hide
from headroom.text.answer_parser import CallDelta
from headroom.text.tokenizer import Tokenizer

ResponseEvent = dict[str, Any]  # without its sequence number
Logprobs = list[dict[str, Any]]
# By field of a call's item: the start of the types of the events that fill the field.
CALL_EVENTS = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}


class OutputItem(Protocol):
    """An item while the model writes it."""

    item: dict[str, Any]

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the events after `output_item.added` and before the first delta."""

    def end(self) -> Iterator[ResponseEvent]:
        """Complete the item; yield the events after the last delta, before `output_item.done`."""


class OutputWriter:
    """Builds the items of one answer from its deltas, and yields the events of each change."""

    def __init__(
        self,
        tools: OfferedTools,
        *,
        shows_thoughts: bool = True,
        summarises: bool = False,  # send thoughts as summary, too: many clients show only that
        hides: bool = False,  # send thoughts as `encrypted_content`, too
        tokenizer: Tokenizer | None = None,  # None: no logprobs are reported
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._shows_thoughts = shows_thoughts
        self._summarises = summarises
        self._hides = hides
        self._tokenizer = tokenizer
        self._open: OutputItem | None = None
        self._blank = ""  # white space that begins a message only if text follows
        self._call = -1  # index of the open call

    def add(self, delta: AnswerDelta) -> Iterator[ResponseEvent]:
        """Take the next delta."""
        if delta.thought and self._shows_thoughts:
            yield from self._add_thought(delta.thought)
        if delta.text:
            yield from self._add_text(delta.text, delta.shown_tokens)
        for call in delta.calls:
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """End the open item with a status; an answer without items gets an empty message."""
        if not self.items:
            blank = self._blank
            yield from self._begin(MessageItem())
            yield from self._add_text(blank, ())
        yield from self._end(status)

    def _add_thought(self, thought: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, ReasoningItem):
            item = ReasoningItem(summarises=self._summarises, hides=self._hides)
            yield from self._begin(item)
        assert isinstance(self._open, ReasoningItem)
        yield from self._placed(self._open.add(thought))

    def _add_text(self, text: str, tokens: Sequence[AnswerToken]) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, MessageItem):
            text = self._blank + text
            if text.isspace():
                self._blank = text
                return
            yield from self._begin(MessageItem())
        assert isinstance(self._open, MessageItem)
        if text:
            logprobs: Logprobs = []
            if self._tokenizer is not None:
                logprobs = [scored_token(self._tokenizer, token) for token in tokens]
            yield from self._placed(self._open.add(text, logprobs))

    def _add_call(self, call: CallDelta) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, CallItem) or call.index != self._call:
            self._call = call.index
            yield from self._begin(CallItem(self._tools.called(call.name), call.id))
        assert isinstance(self._open, CallItem)
        yield from self._placed(self._open.add(call.arguments))

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self._end("completed")
        self._open, self._blank = item, ""
        self.items.append(item.item)
        yield self._item_event("response.output_item.added")
        yield from self._placed(item.begin())

    def _end(self, status: str) -> Iterator[ResponseEvent]:
        if self._open is None:
            return
        yield from self._placed(self._open.end())
        if "status" in self._open.item:
            self._open.item["status"] = status
        yield self._item_event("response.output_item.done")
        self._open = None

    def _item_event(self, kind: str) -> ResponseEvent:
        place = len(self.items) - 1
        # A copy: the item changes later, and the event must not.
        return {"type": kind, "output_index": place, "item": dict(self.items[-1])}

    def _placed(self, events: Iterator[ResponseEvent]) -> Iterator[ResponseEvent]:
        """Yield events with the place and the id of the open item."""
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

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the event that opens the text."""
        yield part_event("added", _text_part("", []))

    def add(self, text: str, logprobs: Logprobs) -> Iterator[ResponseEvent]:
        """Yield the event that adds text."""
        self._texts.append(text)
        self._logprobs += logprobs
        yield {
            "type": "response.output_text.delta",
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }

    def end(self) -> Iterator[ResponseEvent]:
        """Yield the events with the whole text."""
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

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the events that open the thought."""
        if self._summarises:
            yield _summary_event("part.added", part=_summary_part(""))
        yield part_event("added", _thought_part(""))

    def add(self, text: str) -> Iterator[ResponseEvent]:
        """Yield the events that add to the thought."""
        self._texts.append(text)
        if self._summarises:
            yield _summary_event("text.delta", delta=text)
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def end(self) -> Iterator[ResponseEvent]:
        """Yield the events with the whole thought."""
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
        self._event = CALL_EVENTS[self._field]
        self._pieces: list[str] = []
        self.item: dict[str, Any] = {
            "id": new_id("ctc" if custom else "fc"),
            "type": "custom_tool_call" if custom else "function_call",
            "status": "in_progress",
            "call_id": call_id,
            **called.call_fields(),
            self._field: "",
        }

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield nothing: the item itself has the name."""
        yield from ()

    def add(self, arguments: str) -> Iterator[ResponseEvent]:
        """Yield the event that adds to the arguments, or to the text of a custom tool."""
        piece = arguments if self._input is None else self._input.push(arguments)
        yield from self._add_piece(piece)

    def end(self) -> Iterator[ResponseEvent]:
        """Yield the event with the whole arguments."""
        if self._input is not None:
            yield from self._add_piece(self._input.finish())
        text = "".join(self._pieces)
        yield {"type": f"{self._event}.done", self._field: text}
        self.item[self._field] = text

    def _add_piece(self, piece: str) -> Iterator[ResponseEvent]:
        self._pieces.append(piece)
        if piece:
            yield {"type": f"{self._event}.delta", "delta": piece}


def new_id(prefix: str) -> str:
    """Return a new id of an item or a response."""
    return f"{prefix}_{uuid.uuid4().hex}"


def replay(items: Sequence[dict[str, Any]]) -> Iterator[ResponseEvent]:
    """Yield the events of complete items again, with one delta for each text."""
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


def _replay_inside(item: dict[str, Any]) -> Iterator[ResponseEvent]:
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
    for field, name in CALL_EVENTS.items():
        if field in item:
            yield {"type": f"{name}.delta", "delta": item[field]}
            yield {"type": f"{name}.done", field: item[field]}


def part_event(what: str, part: dict[str, Any]) -> ResponseEvent:
    """Return the event that begins ("added") or ends ("done") a part of the content."""
    return {"type": f"response.content_part.{what}", "content_index": 0, "part": part}


def _summary_event(what: str, **fields: Any) -> ResponseEvent:
    return {"type": f"response.reasoning_summary_{what}", "summary_index": 0, **fields}


def _text_part(text: str, logprobs: Logprobs) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def count_json_bytes(value: object) -> int:
    """Return the size of a value as JSON, in bytes."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
