"""POST /v1/chat/completions: a conversation to its next turn, as OpenAI words it."""

import asyncio
import uuid
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headroom.engine.request import TokenLogprobs
from headroom.server.openai_shared import (
    Head,
    Job,
    logprob_number,
    make_requests,
    respond,
    seed_of,
    token_text,
)
from headroom.server.schemas import ChatBody, read_body
from headroom.server.stream import AnswerToken, Delta, Service
from headroom.text.tokenizer import Tokenizer


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody, service.options.max_body)
    service.check_model(body.model)
    messages = [message.for_template() for message in body.messages]
    # Long prompts take a while to encode; other clients' events must not wait for that.
    prompt = await asyncio.to_thread(service.llm.encode_chat, messages)
    service.check_prompt(prompt, "messages")
    seed = seed_of(body)
    settings: dict[str, Any] = {"seed": seed}
    if body.max_completion_tokens is not None:
        settings["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        settings["logprobs"] = body.top_logprobs or 0
    head = Head(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion.chunk" if body.stream else "chat.completion",
        model=service.llm.name,
        seed=seed,
    )
    requests = make_requests(service, [prompt], body, **settings)
    writer = ChatWriter(service.llm.tokenizer, with_logprobs=bool(body.logprobs))
    return await respond(request, service, Job(body, requests, head, writer))


class ChatWriter:
    """Writes choices of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def first(self, index: int) -> dict[str, Any]:
        """Return the choice that names the speaker."""
        return _streamed(index, {"role": "assistant", "content": ""})

    def piece(self, delta: Delta) -> dict[str, Any]:
        """Return the choice that adds text."""
        return _streamed(delta.index, {"content": delta.text}, self._logprobs(delta))

    def last(self, delta: Delta) -> dict[str, Any]:
        """Return the choice that says why the answer ended."""
        reason = delta.end.finish_reason if delta.end is not None else None
        return {**_streamed(delta.index, {}), "finish_reason": reason}

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.end.finish_reason if delta.end is not None else None,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._token(token) for token in delta.tokens], "refusal": None}

    def _token(self, token: AnswerToken) -> dict[str, Any]:
        known = token.logprobs or TokenLogprobs(0.0, ())
        top = [self._entry(rival, logprob) for rival, logprob in known.top]
        return {**self._entry(token.id, known.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": logprob_number(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def _streamed(
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
