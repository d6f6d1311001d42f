"""Ollama's API: POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from headroom.answers import AnswerDelta, AnswerToken, Completion, join_deltas
from headroom.engine.request import GenerationRequest
from headroom.errors import ContextLengthError
from headroom.llm import LLM
from headroom.server.cut_chats import cut_to_fit
from headroom.server.holding import WaitingStream
from headroom.server.json_values import JSONResponse, write_json, write_with_list
from headroom.server.ollama_bodies import (
    AnswerBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    OllamaChatBody,
)
from headroom.server.openai_shared import scored_token
from headroom.server.refusals import problem_of
from headroom.server.schemas import read_body
from headroom.server.service import (
    Answers,
    Embeddings,
    NewParser,
    Service,
    fill_in_of,
    make_requests,
    no_parser,
)
from headroom.server.shelf import ShelvedModel
from headroom.server.sse import EventStream, while_connected
from headroom.text.answer_parser import CallDelta, ToolCall, join_calls
from headroom.text.long_texts import check_not_far_beyond, first_tokens
from headroom.text.tokenizer import Tokenizer

router = APIRouter()
log = logging.getLogger("headroom.server")

Line = dict[str, Any]  # one JSON object of a stream, or a whole answer
NANOSECONDS = 1_000_000_000


class LineStream(EventStream):
    """Sends JSON objects, one on each line."""

    media_type = "application/x-ndjson"


def as_line(value: Mapping[str, Any]) -> bytes:
    """Return one line of a stream."""
    return write_json(value).encode() + b"\n"


def quiet_line(model: str, parts: Mapping[str, Any]) -> bytes:
    """Return a line with empty `parts`, which keeps the connection of a waiting client alive."""
    return as_line({"model": model, "created_at": now(), **parts, "done": False})


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class PartWriter(Protocol):
    """How one endpoint writes its answers as JSON."""

    def part(self, text: str, thought: str, calls: Sequence[ToolCall]) -> Line:
        """Return the fields with a piece of an answer, or with a whole answer."""

    def last(self, text: str) -> Line:
        """Return further fields of the last line; `text` is the whole answer."""


@dataclass(frozen=True, slots=True)
class OllamaChatWriter:
    """Writes messages of /api/chat."""

    def part(self, text: str, thought: str, calls: Sequence[ToolCall]) -> Line:
        """Return a message of the assistant."""
        message: Line = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [_shown_call(index, call) for index, call in enumerate(calls)]
        return {"message": message}

    def last(self, text: str) -> Line:
        """Return no fields: the last line of a chat has no others."""
        return {}


@dataclass(frozen=True, slots=True)
class GenerateWriter:
    """Writes texts of /api/generate."""

    tokenizer: Tokenizer
    prompt: Sequence[int]
    with_context: bool

    def part(self, text: str, thought: str, calls: Sequence[ToolCall]) -> Line:
        """Return the text and the thought."""
        return {"response": text, **({"thinking": thought} if thought else {})}

    def last(self, text: str) -> Line:
        """Return the tokens of prompt and answer, which the next request may send back."""
        if not self.with_context:
            return {}
        answer = self.tokenizer.encode(text, special=False, add_bos=False)
        return {"context": [*self.prompt, *answer]}


def _shown_call(index: int, call: ToolCall) -> Line:
    function = {"index": index, "name": call.name, "arguments": from_json(call.arguments)}
    return {"id": call.id, "function": function}


@dataclass(frozen=True, slots=True)
class _EndedCalls:
    """Calls that the model has finished, and the text of those that broke off."""

    whole: list[ToolCall]
    broken: str

    @classmethod
    def of(cls, calls: Sequence[ToolCall]) -> "_EndedCalls":
        """Sort calls by whether their arguments are a JSON object."""
        whole = [call for call in calls if _is_object(call.arguments)]
        broken = [call for call in calls if not _is_object(call.arguments)]
        return cls(whole, "".join(f"{call.name}({call.arguments}" for call in broken))


@dataclass(slots=True)
class _OpenCalls:
    """Collects the pieces of calls, because Ollama's clients get each call whole."""

    deltas: list[CallDelta] = field(default_factory=list)
    returned: int = 0  # calls that `add` has returned

    def add(self, delta: AnswerDelta) -> _EndedCalls:
        """Return the calls that end with this delta.

        A call ends when text or another call follows it, or with the answer.
        """
        self.deltas += delta.calls
        known = join_calls(self.deltas)
        all_end = delta.finish_reason is not None or bool(delta.text and not delta.calls)
        end = len(known) if all_end else max(self.returned, len(known) - 1)
        ended = known[self.returned : end]
        self.returned = end
        return _EndedCalls.of(ended)


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text), dict)
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request: its body, its answer, and how the answer is written."""

    body: AnswerBody
    answers: Answers
    writer: PartWriter
    began: float  # time.perf_counter()
    load_s: float  # seconds until the model was loaded

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the answer; an error becomes the last line."""
        try:
            lines = self._lines()
            async with aclosing(lines):
                async for line in lines:
                    yield as_line(line)
        except Exception as error:
            yield as_line({"error": problem_of(error).message})

    async def whole(self) -> Line:
        """Return the answer as one object."""
        async with aclosing(self.answers.deltas()) as deltas:
            answer = join_deltas([delta async for delta in deltas])
        calls = _EndedCalls.of(answer.tool_calls)
        parts = self.writer.part(answer.text + calls.broken, answer.thought, calls.whole)
        parts |= self._logprobs(answer.shown_tokens)
        return self._object(parts, answer, answer.text)

    async def _lines(self) -> AsyncGenerator[Line, None]:
        calls, text = _OpenCalls(), ""
        async with aclosing(self.answers.deltas()) as deltas:
            async for delta in deltas:
                ended = calls.add(delta)
                said = delta.text + ended.broken
                if said or delta.thought or ended.whole:
                    parts = self.writer.part(said, delta.thought, ended.whole)
                    parts |= self._logprobs(delta.shown_tokens)
                    yield self._frame() | parts | {"done": False}
                text += delta.text
                if delta.finish_reason is not None:
                    yield self._object(self.writer.part("", "", ()), delta, text)

    def _frame(self) -> Line:
        return {"model": self.body.model, "created_at": now()}

    def _object(self, parts: Line, end: AnswerDelta | Completion, text: str) -> Line:
        times = end.timings
        return {
            **self._frame(),
            **parts,
            "done": True,
            "done_reason": end.finish_reason,
            **self.writer.last(text),
            "total_duration": _ns(time.perf_counter() - self.began),
            "load_duration": _ns(self.load_s),
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": _ns(times.prefill_s),
            "eval_count": end.generated_tokens,
            "eval_duration": _ns(times.decode_s),
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> Line:
        if not self.body.logprobs:
            return {}
        return {"logprobs": [_scored(self.answers.llm.tokenizer, token) for token in tokens]}


def _scored(tokenizer: Tokenizer, token: AnswerToken) -> Line:
    """Return a token with its logprob; Ollama leaves out an empty list of likeliest tokens."""
    shown = scored_token(tokenizer, token)
    if not shown["top_logprobs"]:
        del shown["top_logprobs"]
    return shown


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)


@router.post("/api/chat", response_model=None)
async def chat(request: Request) -> Response:
    """Answer a conversation; without messages, load or unload the model."""
    began = time.perf_counter()
    service: Service = request.app.state.service
    body = await read_body(request, OllamaChatBody, service.options.max_body)
    shelved = service.find_shelved(body.model)
    nothing = {"message": {"role": "assistant", "content": ""}}
    if not body.messages:
        return await _load_only(service, shelved, body, nothing)
    conversation = await service.in_thread(body.conversation)
    llm = await _answering_model(service, shelved, body, nothing)
    load_s = time.perf_counter() - began
    start = partial(service.start_chat, llm, settings=body.sampling(), streams=body.streams)
    try:
        answers = await start(conversation)
    except ContextLengthError:
        if body.truncate is False:
            raise
        most = body.sampling().get("max_tokens")
        cut = await service.in_thread(cut_to_fit, llm, conversation, most)
        log.info(
            "ollama: left %d of %d messages out of a chat, to fit the context of %d tokens",
            len(conversation.messages) - len(cut.messages),
            len(conversation.messages),
            llm.context,
        )
        answers = await start(cut)
    writer = OllamaChatWriter()
    call = Call(body=body, answers=answers, writer=writer, began=began, load_s=load_s)
    return await _respond(request, service, call)


@router.post("/api/generate", response_model=None)
async def generate(request: Request) -> Response:
    """Answer or continue one prompt; without a prompt, load or unload the model."""
    began = time.perf_counter()
    service: Service = request.app.state.service
    body = await read_body(request, GenerateBody, service.options.max_body)
    shelved = service.find_shelved(body.model)
    if not body.prompt and not body.suffix:
        return await _load_only(service, shelved, body, {"response": ""})
    llm = await _answering_model(service, shelved, body, {"response": ""})
    load_s = time.perf_counter() - began
    asked, new_parser = await service.in_thread(_prepare, llm, body)
    answers = service.start(llm, [asked], new_parser)
    with_context = not body.raw and not body.suffix
    writer = GenerateWriter(llm.tokenizer, asked.prompt, with_context)
    call = Call(body=body, answers=answers, writer=writer, began=began, load_s=load_s)
    return await _respond(request, service, call)


@router.post("/api/embed", response_model=None)
async def embed(request: Request) -> Response:
    """Answer with a vector of length 1 for each text."""
    began = time.perf_counter()
    service: Service = request.app.state.service
    body = await read_body(request, EmbedBody, service.options.max_body)
    shelved = service.find_shelved(body.model)
    llm = await _kept_model(service, shelved, body.keep_alive)
    load_s = time.perf_counter() - began
    texts: list[str | list[int]] = [*body.input]
    if body.truncate is not False:
        texts = await service.in_thread(_cut, llm, body.input)
    found = Embeddings(vectors=[], prompt_tokens=0)
    if texts:
        work = service.embed(llm, texts, dimensions=body.dimensions or None)
        found = await while_connected(request, work)
    frame = {
        "model": body.model,
        "total_duration": _ns(time.perf_counter() - began),
        "load_duration": _ns(load_s),
        "prompt_eval_count": found.prompt_tokens,
    }
    vectors = (vector.tolist() for vector in found.vectors)
    written = await service.in_thread(write_with_list, frame, "embeddings", vectors)
    return Response(written, media_type="application/json")


@router.post("/api/embeddings", response_model=None)
async def embeddings(request: Request) -> dict[str, Any]:
    """Answer with the vector of one text; the older form of /api/embed."""
    service: Service = request.app.state.service
    body = await read_body(request, EmbeddingsBody, service.options.max_body)
    llm = await _kept_model(service, service.find_shelved(body.model), body.keep_alive)
    if not body.prompt:
        return {"embedding": []}
    texts = await service.in_thread(_cut, llm, [body.prompt])
    work = service.embed(llm, texts, input_field="prompt")
    found = await while_connected(request, work)
    return {"embedding": found.vectors[0].tolist()}


async def _respond(request: Request, service: Service, call: Call) -> Response:
    call.body.warn_of_context(call.answers.llm.context)
    if call.body.streams:
        keep_alive_s = service.options.keep_alive
        quiet = quiet_line(call.body.model, call.writer.part("", "", ()))
        return LineStream(call.stream(), keep_alive_s, call.answers.close, lambda: quiet)
    try:
        return JSONResponse(await while_connected(request, call.whole()))
    finally:
        call.answers.close()


async def _answering_model(
    service: Service, shelved: ShelvedModel, body: AnswerBody, parts: Line
) -> LLM:
    """Return the loaded model; a stream gets lines with these empty parts until it is loaded."""
    quiet = quiet_line(body.model, parts)
    waiting = WaitingStream(
        LineStream.media_type, lambda: quiet, before_error=b"", after_error=b"\n"
    )
    await service.model(shelved.name, streams=body.streams, waiting=waiting)
    return await _kept_model(service, shelved, body.keep_alive)


async def _kept_model(service: Service, shelved: ShelvedModel, keep_alive: float | None) -> LLM:
    """Return the model, loaded, and set how long it stays loaded if the request says so."""
    llm = await service.model(shelved.name)
    if keep_alive is not None:
        service.shelf.keep(shelved, keep_alive)
    return llm


async def _load_only(
    service: Service, shelved: ShelvedModel, body: AnswerBody, parts: Line
) -> Response:
    """Load a model, or unload it if `keep_alive` is 0."""
    reason = "load"
    if body.keep_alive == 0:
        reason = "unload"
        await service.shelf.unload(shelved)
    else:
        await _kept_model(service, shelved, body.keep_alive)
    frame = {"model": body.model, "created_at": now()}
    return JSONResponse({**frame, **parts, "done": True, "done_reason": reason})


def _prepare(llm: LLM, body: GenerateBody) -> tuple[GenerationRequest, NewParser]:
    """Return the request of one prompt, and the parser of its answer."""
    settings, tokenizer = body.sampling(), llm.tokenizer
    text = body.prompt or ""
    if not (body.raw or body.suffix) and llm.template is not None:
        prompt = llm.prepare_chat(body.conversation(), must_fit=True)
        tokens = prompt.tokens
        if body.context and tokens[:1] == (tokenizer.bos_id,):
            tokens = tokens[1:]  # the context begins with this token already
        (asked,) = make_requests(
            llm,
            [(*body.context, *tokens)],
            settings,
            prompt_field="prompt",
            streams=body.streams,
            new_constraint=prompt.new_constraint,
        )
        return asked, prompt.new_parser
    for part in (text, body.suffix or ""):
        check_not_far_beyond(tokenizer, part, llm.context)
    grammar = None if body.format is None else llm.grammars.compile([body.format], continues=True)
    fill_in = fill_in_of(llm, body.suffix)
    if fill_in is not None and body.suffix:
        plain = fill_in.prompt(tokenizer, text, body.suffix)
    else:
        system = f"{body.system}\n" if body.system and not body.raw else ""
        add_bos = False if body.context else None  # None: as the tokenizer usually does
        plain = [*body.context, *tokenizer.encode(system + text, add_bos=add_bos)]
    (asked,) = make_requests(
        llm,
        [plain],
        settings,
        prompt_field="prompt",
        streams=body.streams,
        new_constraint=lambda most: None if grammar is None else grammar.begin(),
    )
    if fill_in is not None:
        asked = replace(asked, stop_ids=asked.stop_ids | fill_in.stop_ids)
    return asked, no_parser


def _cut(llm: LLM, texts: Sequence[str]) -> list[str | list[int]]:
    """Return the texts; of those beyond the context, the tokens that fit."""
    cut: list[str | list[int]] = []
    for text in texts:
        beginning = first_tokens(llm.tokenizer, text, llm.context)
        tokens = beginning or llm.embedding_request(text).prompt
        cut.append(text if len(tokens) < llm.context else list(tokens[: llm.context - 1]))
    return cut
