"""POST /v1/chat/completions: answers a conversation, in OpenAI's format."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator, model_validator
from starlette.responses import Response

from headroom.answers import AnswerDelta, AnswerToken, Completion
from headroom.engine.request import MAX_LOGPROBS, TokenLogprobs
from headroom.server.openai_shared import (
    Envelope,
    GenerationCall,
    logprob_number,
    respond,
    token_text,
)
from headroom.server.schemas import (
    Body,
    GenerationBody,
    MaxTokens,
    read_body,
    short,
    unsupported,
    wrong_type,
)
from headroom.server.service import Service
from headroom.text.conversation import Conversation
from headroom.text.tokenizer import Tokenizer

router = APIRouter()

Role = Literal["system", "developer", "user", "assistant", "tool"]


def _check_content(value: object) -> str | None:
    """Return a message's text; several text parts are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("a text or a list of text parts")
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong_type("a text or a list of text parts")
    if part["type"] not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"parts of type {short(part['type'])!r} cannot be read, only text")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise wrong_type("a text part with its text")
    return text


class MessageBody(Body):
    """One turn of a conversation."""

    role: Role
    content: Annotated[str | None, PlainValidator(_check_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "MessageBody":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        turn = self.model_dump(exclude_none=True)
        # Few templates know "developer", the newer name of the role "system".
        turn["role"] = "system" if self.role == "developer" else self.role
        return {**turn, "content": self.content or ""}


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: Any = None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise unsupported("top_logprobs", "top_logprobs needs logprobs to be true.")
        if self.tools and self.tool_choice != "none":
            raise unsupported("tools", "Tools cannot be called yet; leave `tools` out.")
        form = self.response_format
        if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
            raise unsupported("response_format", "Answers can only have the format 'text'.")
        return self


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody, service.options.max_body)
    llm = await service.model(body.model)
    messages = [message.for_template() for message in body.messages]
    settings = body.sampling()
    if body.max_completion_tokens is not None:
        settings["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        settings["logprobs"] = body.top_logprobs or 0
    chat = Conversation(messages=messages)
    answers = await service.start_chat(llm, chat, settings, n=body.n or 1)
    envelope = Envelope(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=llm.name,
    )
    writer = ChatWriter(llm.tokenizer, with_logprobs=bool(body.logprobs))
    return await respond(request, service, GenerationCall(body, answers, envelope, writer))


class ChatWriter:
    """Writes choices of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice that names the speaker."""
        return _streamed(index, {"role": "assistant", "content": ""})

    def piece(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the choice that adds text."""
        logprobs = self._logprobs(delta.shown_tokens)
        parts = {"reasoning_content": delta.thought} if delta.thought else {}
        if delta.text or not parts:
            parts["content"] = delta.text
        return _streamed(delta.index, parts, logprobs)

    def last(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the choice that says why the answer ended."""
        return {**_streamed(delta.index, {}), "finish_reason": delta.finish_reason}

    def whole(self, index: int, answer: Completion) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        return {
            "index": index,
            "message": _message(answer),
            "logprobs": self._logprobs(answer.shown_tokens),
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: AnswerToken) -> dict[str, Any]:
        known = token.logprobs or TokenLogprobs(0.0, ())
        top = [self._entry(alternative, logprob) for alternative, logprob in known.top]
        return {**self._entry(token.id, known.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": logprob_number(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _message(answer: Completion) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    return message


def _streamed(
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
