"""POST /v1/messages: answers a conversation, or counts its tokens, in Anthropic's format."""

import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from headroom.answers import AnswerDelta
from headroom.server.anthropic_body import MessagesBody, PromptBody
from headroom.server.anthropic_errors import error_body
from headroom.server.anthropic_history import hidden_signature
from headroom.server.json_values import JSONResponse
from headroom.server.refusals import problem_of
from headroom.server.request_log import current_record
from headroom.server.schemas import read_body
from headroom.server.service import Answers, Service
from headroom.server.sse import EventStream, event, while_connected
from headroom.text.answer_parser import CallDelta

router = APIRouter()

MessageEvent = dict[str, Any]
OPTIONAL_FIELDS = ("context_management", "finish_details")  # of a message
BROKEN_INPUT = "INVALID_JSON"  # the key that Anthropic's API uses for an input that is not JSON
PING = event({"type": "ping"}, "ping")


@router.post("/v1/messages", response_model=None)
async def create_message(request: Request) -> Response:
    """Answer a conversation with a stream or with one whole message."""
    service: Service = request.app.state.service
    body = await read_body(request, MessagesBody, service.options.max_body)
    chat = await service.in_thread(body.conversation)
    llm = await service.model(body.model, streams=body.stream)
    answers = await service.start_chat(llm, chat, body.sampling())
    call = MessageCall(body, answers, current_record().id)
    if body.stream:
        stream = EventStream(call.stream(), service.options.keep_alive, answers.close, lambda: PING)
        stream.headers["request-id"] = call.request_id
        return stream
    try:
        message = await while_connected(request, call.whole())
        return JSONResponse(message, headers={"request-id": call.request_id})
    finally:
        answers.close()


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens of a prompt."""
    service: Service = request.app.state.service
    body = await read_body(request, PromptBody, service.options.max_body)
    chat = await service.in_thread(body.conversation)
    chat = replace(chat, output_format=None)  # a format adds no tokens
    llm = await service.model(body.model)
    prompt = await service.in_thread(llm.prepare_chat, chat)
    counts: dict[str, Any] = {"input_tokens": len(prompt.tokens)}
    if body.context_management is not None:  # no edit is applied
        counts["context_management"] = {"original_input_tokens": len(prompt.tokens)}
    return JSONResponse(counts, headers={"request-id": current_record().id})


@dataclass(frozen=True, slots=True)
class MessageCall:
    """One HTTP request: its body and its answer."""

    body: MessagesBody
    answers: Answers
    request_id: str

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer; an error becomes the last event."""
        try:
            events = self._events()
            async with aclosing(events):
                async for one in events:
                    yield event(one, one["type"])
        except Exception as error:
            yield event(error_body(problem_of(error), error, self.request_id), "error")

    async def whole(self) -> dict[str, Any]:
        """Return the message that all events add up to."""
        events = self._events()
        async with aclosing(events):
            return join_events([one async for one in events])

    async def _events(self) -> AsyncGenerator[MessageEvent, None]:
        blocks = BlockWriter(hides_thoughts=self.body.hides_thoughts)
        yield {"type": "message_start", "message": self._opening()}
        async with aclosing(self.answers.deltas()) as deltas:
            async for delta in deltas:
                for one in blocks.add(delta):
                    yield one
                if delta.finish_reason is not None:
                    last = delta
        for one in blocks.finish():
            yield one
        yield self._ending(last, called=blocks.called)
        yield {"type": "message_stop"}

    def _opening(self) -> dict[str, Any]:
        """Return the message before its first block."""
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.answers.llm.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                **_usage(self.answers.prompt_tokens, 0, 0, 0),
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "service_tier": "standard",
                "inference_geo": None,
            },
        }

    def _ending(self, last: AnswerDelta, *, called: bool) -> MessageEvent:
        """Return the event with the reason why the message ended, and its token counts."""
        ending: MessageEvent = {
            "type": "message_delta",
            "delta": {
                "stop_reason": self._stop_reason(last, called=called),
                "stop_sequence": last.stop_text,
                "stop_details": None,
                "container": None,
            },
            "usage": _usage(
                last.prompt_tokens,
                last.cached_tokens,
                last.generated_tokens,
                last.thought_tokens,
            ),
        }
        if self.body.context_management is not None:
            ending["context_management"] = {"applied_edits": []}
        if last.finish_details is not None:  # how the thought ended
            ending["finish_details"] = asdict(last.finish_details)
        return ending

    def _stop_reason(self, last: AnswerDelta, *, called: bool) -> str:
        if last.finish_reason == "length":
            reached = last.generated_tokens >= self.body.max_tokens
            return "max_tokens" if reached else "model_context_window_exceeded"
        if last.stop_text is not None:
            return "stop_sequence"
        return "tool_use" if called else "end_turn"


def _usage(prompt: int, cached: int, generated: int, thoughts: int) -> dict[str, Any]:
    """Return the token counts; input tokens are those that were not found in the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": thoughts},
        "server_tool_use": None,
    }


class BlockWriter:
    """Turns the deltas of one answer into the events of its blocks: thinking, text and tool_use.

    White space at the end of text is held back until more text comes. Before a call it is dropped,
    so that no text block is only white space.
    """

    def __init__(self, *, hides_thoughts: bool = False) -> None:
        self._hides_thoughts = hides_thoughts
        self._index = -1  # of the last block
        self._open: str | None = None  # the type of the block that has not ended
        self._thought = ""  # of the open block
        self._blank = ""  # white space that is held
        self._said = False  # there is a block of text
        self.called = False  # there is a call

    def add(self, delta: AnswerDelta) -> Iterator[MessageEvent]:
        """Yield the events of what a delta adds."""
        if delta.thought:
            yield from self._think(delta.thought)
        if delta.text:
            yield from self._say(delta.text)
        for call in delta.calls:
            yield from self._call(call)

    def finish(self) -> Iterator[MessageEvent]:
        """Yield the events that end the last block; no more deltas come."""
        if self._blank and (self._open == "text" or not (self._said or self.called)):
            yield from self._text(self._blank)
        yield from self._end()

    def _think(self, thought: str) -> Iterator[MessageEvent]:
        if self._open != "thinking":
            yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            self._thought = ""
        self._thought += thought
        if not self._hides_thoughts:
            yield self._delta({"type": "thinking_delta", "thinking": thought})

    def _say(self, text: str) -> Iterator[MessageEvent]:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            yield from self._text(shown)

    def _text(self, text: str) -> Iterator[MessageEvent]:
        if self._open != "text":
            self._said = True
            yield from self._start({"type": "text", "text": "", "citations": None})
        yield self._delta({"type": "text_delta", "text": text})

    def _call(self, call: CallDelta) -> Iterator[MessageEvent]:
        if call.name:
            self.called = True
            self._blank = ""
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._start({**block, "caller": {"type": "direct"}})
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _start(self, block: dict[str, Any]) -> Iterator[MessageEvent]:
        yield from self._end()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[MessageEvent]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature()})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _signature(self) -> str:
        """Return the signature of a thought: the thought itself if it is hidden, else a hash."""
        if self._hides_thoughts:
            return hidden_signature(self._thought)
        return hashlib.sha256(self._thought.encode()).hexdigest()

    def _delta(self, delta: dict[str, Any]) -> MessageEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def join_events(events: Iterable[MessageEvent]) -> dict[str, Any]:
    """Return the whole message that the events of one answer add up to."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for one in events:
        kind = one["type"]
        if kind == "message_start":
            message = one["message"]
        elif kind == "content_block_start":
            message["content"].append(one["content_block"])
        elif kind == "content_block_delta":
            index, delta = one["index"], one["delta"]
            if delta["type"] == "input_json_delta":
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
                continue
            name = delta["type"].removesuffix("_delta")
            message["content"][index][name] += delta[name]
        elif kind == "message_delta":
            message |= one["delta"]
            message["usage"] |= one["usage"]
            message |= {name: one[name] for name in OPTIONAL_FIELDS if name in one}
    for index, text in arguments.items():
        message["content"][index]["input"] = read_input(text)
    return message


def read_input(text: str) -> dict[str, Any]:
    """Return the input of a call; one that is incomplete comes as text under BROKEN_INPUT.

    So no client runs a tool with half an input.
    """
    try:
        value = from_json(text)
    except ValueError:
        return {BROKEN_INPUT: text}
    return value if isinstance(value, dict) else {BROKEN_INPUT: text}
