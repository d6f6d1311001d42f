"""POST /v1/completions: continues prompts, in OpenAI's format."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator, model_validator
from starlette.responses import Response

from headroom.answers import AnswerDelta, AnswerToken, Completion
from headroom.engine.request import MAX_COUNT, MAX_LOGPROBS, TokenLogprobs
from headroom.errors import RequestError
from headroom.llm import LLM
from headroom.server.answer_fields import THOUGHTS_OFF
from headroom.server.openai_shared import (
    Envelope,
    GenerationCall,
    logprob_number,
    respond,
    token_text,
)
from headroom.server.output_formats import FormatFields
from headroom.server.schemas import (
    GenerationBody,
    Positive,
    prompt_list,
    read_body,
    unsupported,
)
from headroom.server.service import Service, fill_in_of, make_requests
from headroom.text.detokenizer import Detokenizer
from headroom.text.fill_in import FillIn
from headroom.text.long_texts import check_not_far_beyond
from headroom.text.tokenizer import Tokenizer

router = APIRouter()

DEFAULT_MAX_TOKENS = 16  # OpenAI's default, for this endpoint only
MAX_ANSWERS = 1024  # prompts times n
# Logprobs of echoed prompts in one answer: prompt tokens times n times (logprobs + 1). So many take
# 60 MB in memory if n is 1, and 15 MB as JSON.
MAX_ECHOED_LOGPROBS = 1 << 19


class CompletionBody(FormatFields, GenerationBody):
    """The body of /v1/completions."""

    # Prompts are not rendered by a chat template, so there are no tools and no thoughts.
    harmless = THOUGHTS_OFF

    prompt: Annotated[list[str | list[int]], PlainValidator(prompt_list)]
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None  # 0: only the echo
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Positive | None = None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> "CompletionBody":
        if self.suffix and self.echo:
            raise unsupported("echo", "A prompt with a suffix cannot be echoed.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = f"best_of is {self.best_of}; it can only equal n, which is {self.n or 1}."
            raise unsupported("best_of", message)
        return self


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that its answer begins with (`echo`)."""

    tokens: tuple[int, ...]
    text: str
    hidden: int  # tokens at the start that are not in the client's text: 1 if a BOS was added


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody, service.options.max_body)
    llm = await service.model(body.model, streams=body.stream)
    asked = len(body.prompt) * (body.n or 1)
    if asked > MAX_ANSWERS:
        raise RequestError(
            f"The prompts ask for {asked} answers; at most {MAX_ANSWERS} are given at once.",
            hint="Send fewer prompts, or a smaller n.",
            param="prompt",
        )
    tokenizer = llm.tokenizer
    wanted, fill_in = body.output_format(), fill_in_of(llm, body.suffix)
    prompts = await service.in_thread(_encode, llm, body, fill_in)
    settings = {"max_tokens": DEFAULT_MAX_TOKENS, **body.sampling()}
    only_prompts = body.max_tokens == 0
    if only_prompts:
        settings["max_tokens"] = 1  # the engine's least; `Answers` hides the token
    if body.logprobs is not None:
        if body.echo:
            _check_echoed(sum(map(len, prompts)), body.n or 1, body.logprobs)
        settings |= {"logprobs": body.logprobs, "prompt_logprobs": bool(body.echo)}
    grammar = None
    if wanted is not None:
        grammar = await service.in_thread(partial(llm.grammars.compile, [wanted], continues=True))
    requests = await service.in_thread(
        partial(
            make_requests,
            llm,
            prompts,
            settings,
            body.n or 1,
            prompt_field="prompt",
            streams=bool(body.stream),
            new_constraint=lambda most: None if grammar is None else grammar.begin(),
        )
    )
    if fill_in is not None:
        stops = llm.tokenizer.stop_ids | fill_in.stop_ids
        requests = [replace(request, stop_ids=stops) for request in requests]
    echoed = await service.in_thread(_echo, tokenizer, prompts, body) if body.echo else None
    writer = CompletionWriter(tokenizer, echoed, body)
    envelope = Envelope(
        id=f"cmpl-{uuid.uuid4().hex}",
        object="text_completion",
        model=llm.name,
    )
    answers = service.start(llm, requests, only_prompts=only_prompts)
    return await respond(request, service, GenerationCall(body, answers, envelope, writer))


def _check_echoed(tokens: int, n: int, logprobs: int) -> None:
    """Refuse an echo with more logprobs of prompts than the server holds for one call."""
    wanted = tokens * n * (logprobs + 1)
    if wanted > MAX_ECHOED_LOGPROBS:
        raise RequestError(
            f"The echo has {wanted} logprobs: {tokens} prompt tokens x {n} answers each x "
            f"{logprobs + 1} for each token; at most {MAX_ECHOED_LOGPROBS} are given at once.",
            hint="Lower n or logprobs, or send the prompts in several requests.",
            param="logprobs",
        )


def _encode(llm: LLM, body: CompletionBody, fill_in: FillIn | None) -> list[list[int]]:
    tokenizer = llm.tokenizer
    for text in (*body.prompt, body.suffix):
        if isinstance(text, str):
            check_not_far_beyond(tokenizer, text, llm.context)
    if fill_in is not None and body.suffix:
        return [fill_in.prompt(tokenizer, prompt, body.suffix) for prompt in body.prompt]
    return [
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt
    ]


def _echo(
    tokenizer: Tokenizer, prompts: Sequence[list[int]], body: CompletionBody
) -> list[EchoedPrompt]:
    echoed = []
    for tokens, given in zip(prompts, body.prompt, strict=True):
        if isinstance(given, str):
            has_bos = given.startswith(tokenizer.bos_token)
            added_bos = tokens[0] == tokenizer.bos_id and not has_bos
            echoed.append(EchoedPrompt(tuple(tokens), given, hidden=int(added_bos)))
        else:
            echoed.append(EchoedPrompt(tuple(tokens), tokenizer.decode(tokens), hidden=0))
    return echoed


class CompletionWriter:
    """Writes choices of /v1/completions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        echoed: Sequence[EchoedPrompt] | None,  # None: answers do not begin with their prompts
        body: CompletionBody,
    ) -> None:
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._choices_per_prompt = body.n or 1
        self._with_logprobs = body.logprobs is not None
        self._texts: dict[int, str] = {}  # of tokens, by id
        self._prompt_parts: dict[int, ScoredTokens] = {}  # by the prompt's number

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice with the echoed prompt; None without `echo`."""
        prompt = self._prompt(index)
        return None if prompt is None else _choice(index, prompt.text)

    def pieces(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """Return what a delta adds to text and logprobs."""
        logprobs = self._logprobs(delta.index, delta.shown_tokens, delta.prompt_logprobs)
        if not delta.text and logprobs is None:
            return []
        return [_choice(delta.index, delta.text, logprobs)]

    def last(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the choice that says why the answer ended."""
        return {**_choice(delta.index, ""), "finish_reason": delta.finish_reason}

    def whole(self, index: int, answer: Completion) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        prompt = self._prompt(index)
        text = answer.text if prompt is None else prompt.text + answer.text
        logprobs = self._logprobs(index, answer.shown_tokens, answer.prompt_logprobs)
        return {**_choice(index, text, logprobs), "finish_reason": answer.finish_reason}

    def _prompt(self, index: int) -> EchoedPrompt | None:
        return None if self._echoed is None else self._echoed[index // self._choices_per_prompt]

    def _logprobs(
        self,
        index: int,
        answer_tokens: Sequence[AnswerToken],
        prompt_logprobs: Sequence[TokenLogprobs | None],
    ) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        prompt, before = self._prompt(index), ScoredTokens()
        if prompt is not None and prompt_logprobs:
            before = self._of_prompt(index // self._choices_per_prompt, prompt, prompt_logprobs)
        shift = 0 if prompt is None else len(prompt.text)
        return (before + self._scored(answer_tokens, shift)).as_json()

    def _of_prompt(
        self, number: int, prompt: EchoedPrompt, logprobs: Sequence[TokenLogprobs | None]
    ) -> "ScoredTokens":
        """Return a prompt's tokens as JSON; all answers to the prompt share them."""
        if number not in self._prompt_parts:
            detokenizer, offset, tokens = Detokenizer(self._tokenizer, show_control=True), 0, []
            for position, (token, known) in enumerate(zip(prompt.tokens, logprobs, strict=True)):
                tokens.append(AnswerToken(token, offset, known))
                if position >= prompt.hidden:
                    offset += len(detokenizer.push(token))
            self._prompt_parts[number] = self._scored(tokens)
        return self._prompt_parts[number]

    def _scored(self, tokens: Sequence[AnswerToken], shift: int = 0) -> "ScoredTokens":
        """Return tokens as JSON; `shift` is added to their places in the text."""
        return ScoredTokens(
            tokens=[self._text(token.id) for token in tokens],
            token_logprobs=[
                None if token.logprobs is None else logprob_number(token.logprobs.logprob)
                for token in tokens
            ],
            top_logprobs=[self._top(token) for token in tokens],
            text_offset=[token.offset + shift for token in tokens],
        )

    def _top(self, token: AnswerToken) -> dict[str, float] | None:
        """Return the likeliest tokens and, as OpenAI's endpoint does, the drawn one."""
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        for alternative, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):
            top.setdefault(self._text(alternative), logprob_number(logprob))
        return top

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._tokenizer, token)
        return self._texts[token]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens with their logprobs, as the field `logprobs` of a choice has them."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)  # characters before each token

    def __add__(self, after: "ScoredTokens") -> "ScoredTokens":
        """Return these tokens and those after them; their entries are not copied."""
        return ScoredTokens(
            self.tokens + after.tokens,
            self.token_logprobs + after.token_logprobs,
            self.top_logprobs + after.top_logprobs,
            self.text_offset + after.text_offset,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object; it shares the lists of this one."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def _choice(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
