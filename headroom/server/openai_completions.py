"""POST /v1/completions: prompts to their continuations, as OpenAI words it."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headroom.engine.request import TokenLogprobs
from headroom.errors import RequestError
from headroom.server.openai_shared import (
    Head,
    Job,
    logprob_number,
    make_requests,
    respond,
    seed_of,
    token_text,
)
from headroom.server.schemas import CompletionBody, read_body
from headroom.server.stream import AnswerToken, Delta, Service
from headroom.text.detokenizer import Detokenizer
from headroom.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only
MAX_ANSWERS = 1024  # prompts times n


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: what the model reads, and what an echo shows."""

    tokens: tuple[int, ...]
    text: str
    hidden: int  # leading tokens that the text given by the client does not contain


async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody, service.options.max_body)
    service.check_model(body.model)
    answers = len(body.prompt) * (body.n or 1)
    if answers > MAX_ANSWERS:
        raise RequestError(
            f"The prompts ask for {answers} answers; at most {MAX_ANSWERS} are given at once.",
            param="prompt",
        )
    prompts = await asyncio.to_thread(_read_prompts, service, body.prompt)
    seed = seed_of(body)
    settings: dict[str, Any] = {"seed": seed, "max_tokens": body.max_tokens or DEFAULT_MAX_TOKENS}
    if body.logprobs is not None:
        settings |= {"logprobs": body.logprobs, "prompt_logprobs": bool(body.echo)}
    head = Head(
        id=f"cmpl-{uuid.uuid4().hex}", object="text_completion", model=service.llm.name, seed=seed
    )
    requests = make_requests(service, [prompt.tokens for prompt in prompts], body, **settings)
    writer = CompletionWriter(service.llm.tokenizer, prompts, body)
    return await respond(request, service, Job(body, requests, head, writer))


def _read_prompts(service: Service, given: Sequence[str | list[int]]) -> list[Prompt]:
    prompts = []
    for prompt in given:
        tokenizer = service.llm.tokenizer
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        service.check_prompt(tokens, "prompt")
        prompts.append(_describe(tokenizer, tokens, prompt))
    return prompts


def _describe(tokenizer: Tokenizer, tokens: Sequence[int], given: str | list[int]) -> Prompt:
    if not isinstance(given, str):
        return Prompt(tuple(tokens), tokenizer.decode(tokens), hidden=0)
    added_bos = tokens[0] == tokenizer.bos_id and not given.startswith(tokenizer.bos_token)
    return Prompt(tuple(tokens), given, hidden=int(added_bos))


class CompletionWriter:
    """Writes choices of /v1/completions."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[Prompt], body: CompletionBody
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._choices_per_prompt = body.n or 1
        self._echo = bool(body.echo)
        self._with_logprobs = body.logprobs is not None

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that echoes the prompt, where that was asked for."""
        return _choice(index, self._prompt(index).text) if self._echo else None

    def piece(self, delta: Delta) -> dict[str, Any]:
        """Return the choice that adds text."""
        return _choice(delta.index, delta.text, self._logprobs(delta))

    def last(self, delta: Delta) -> dict[str, Any]:
        """Return the choice that says why the answer ended."""
        reason = delta.end.finish_reason if delta.end is not None else None
        return {**_choice(delta.index, ""), "finish_reason": reason}

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        text = self._prompt(delta.index).text + delta.text if self._echo else delta.text
        choice = _choice(delta.index, text, self._logprobs(delta))
        return {**choice, "finish_reason": self.last(delta)["finish_reason"]}

    def _prompt(self, index: int) -> Prompt:
        return self._prompts[index // self._choices_per_prompt]

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        prompt = self._prompt(delta.index)
        shift = len(prompt.text) if self._echo else 0
        tokens = [
            AnswerToken(token.id, token.offset + shift, token.logprobs) for token in delta.tokens
        ]
        if delta.prompt_logprobs:
            tokens = self._prompt_tokens(prompt, delta.prompt_logprobs) + tokens
        return {
            "tokens": [token_text(self._tokenizer, token.id) for token in tokens],
            "token_logprobs": [
                None if token.logprobs is None else logprob_number(token.logprobs.logprob)
                for token in tokens
            ],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _prompt_tokens(
        self, prompt: Prompt, logprobs: Sequence[TokenLogprobs | None]
    ) -> list[AnswerToken]:
        detokenizer, offset, tokens = Detokenizer(self._tokenizer, show_control=True), 0, []
        for position, (token, known) in enumerate(zip(prompt.tokens, logprobs, strict=True)):
            tokens.append(AnswerToken(token, offset, known))
            if position >= prompt.hidden:
                offset += len(detokenizer.push(token))
        return tokens

    def _top(self, token: AnswerToken) -> dict[str, float] | None:
        """Return the likeliest tokens and the one at hand, as this endpoint always did."""
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        for rival, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):
            top.setdefault(token_text(self._tokenizer, rival), logprob_number(logprob))
        return top


def _choice(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
