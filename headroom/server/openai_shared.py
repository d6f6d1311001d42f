"""What OpenAI's chat and completions endpoints share: choices, usage, streamed chunks."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from headroom import __version__
from headroom.answers import AnswerDelta, AnswerToken, Completion, join_deltas
from headroom.engine.request import TokenLogprobs
from headroom.server.json_values import JSONResponse
from headroom.server.refusals import problem_of
from headroom.server.schemas import GenerationBody
from headroom.server.service import Answers, Service
from headroom.server.sse import EventStream, event, while_connected
from headroom.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express
FINGERPRINT = f"headroom-{__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields around the choices; all chunks of a stream have the same ones."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the JSON object of a whole answer, or of one chunk of a stream."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": list(choices),
            **more,
        }


class ChoiceWriter(Protocol):
    """How one endpoint writes the choices of its answers as JSON."""

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the first choice of a streamed answer, before its first token; None for none."""

    def pieces(self, delta: AnswerDelta) -> Sequence[dict[str, Any]]:
        """Return the choices that a delta adds to a streamed answer, one for each chunk."""

    def last(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the choice that ends a streamed answer."""

    def whole(self, index: int, answer: Completion) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """One HTTP request: its body, its answers, and how they are written as JSON."""

    body: GenerationBody
    answers: Answers
    envelope: Envelope
    writer: ChoiceWriter

    def totals(self, answers: Mapping[int, AnswerDelta | Completion]) -> dict[str, Any]:
        """Return the fields that sum up all answers, given the answers or their last deltas."""
        in_order = [answers[index] for index in sorted(answers)]
        return {**usage_and_timings(in_order, self.body.n or 1), "seed": self.answers.seed}


async def respond(request: Request, service: Service, call: GenerationCall) -> Response:
    """Answer a request with a stream or with one JSON object."""
    if call.body.stream:
        events = _events(_chunks(call))
        return EventStream(events, service.options.keep_alive, call.answers.close)
    try:
        return await while_connected(request, _whole(call))
    finally:
        call.answers.close()


async def _events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yield chunks as events; an error becomes the last event, since the stream has begun."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield event(chunk)
    except Exception as error:
        yield event(problem_of(error).body())
    else:
        yield DONE


async def _chunks(call: GenerationCall) -> AsyncGenerator[dict[str, Any], None]:
    writer, envelope, with_usage = call.writer, call.envelope, call.body.include_usage
    usage: dict[str, Any] = {"usage": None} if with_usage else {}
    ends: dict[int, AnswerDelta] = {}
    for index in range(call.answers.count):
        if (opening := writer.first(index)) is not None:
            yield envelope.wrap([opening], **usage)
    async with aclosing(call.answers.deltas()) as deltas:
        async for delta in deltas:
            for piece in writer.pieces(delta) if delta.shows else ():
                yield envelope.wrap([piece], **usage)
            if delta.finish_reason is None:
                continue
            ends[delta.index] = delta
            more = dict(usage)
            if len(ends) == call.answers.count and not with_usage:
                more = call.totals(ends)
                del more["usage"]
            yield envelope.wrap([writer.last(delta)], **more)
    if with_usage:
        yield envelope.wrap([], **call.totals(ends))


async def _whole(call: GenerationCall) -> JSONResponse:
    parts: dict[int, list[AnswerDelta]] = {index: [] for index in range(call.answers.count)}
    async with aclosing(call.answers.deltas()) as deltas:
        async for delta in deltas:
            parts[delta.index].append(delta)
    # The logprobs of a long prompt take a while to write; in a thread they hold up no other client.
    return await asyncio.to_thread(_write_whole, call, parts)


def _write_whole(call: GenerationCall, parts: Mapping[int, Sequence[AnswerDelta]]) -> JSONResponse:
    done = {index: join_deltas(part) for index, part in parts.items()}
    choices = [call.writer.whole(index, answer) for index, answer in done.items()]
    return JSONResponse(call.envelope.wrap(choices, **call.totals(done)))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; a token that is not whole characters becomes `bytes:\\xNN`."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def scored_token(tokenizer: Tokenizer, token: AnswerToken) -> dict[str, Any]:
    """Return a token with its logprob, and the likeliest tokens with theirs, as JSON."""
    known = token.logprobs or TokenLogprobs(0.0, ())
    top = [_scored(tokenizer, other.id, other.logprob) for other in known.top]
    return {**_scored(tokenizer, token.id, known.logprob), "top_logprobs": top}


def _scored(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": logprob_number(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def logprob_number(value: float) -> float:
    """Return a logprob as a number that JSON can express, for minus infinity and NaN, too."""
    return min(value, 0.0) if value > LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN


def usage_and_timings(
    answers: Sequence[AnswerDelta | Completion], choices_per_prompt: int
) -> dict[str, Any]:
    """Return `usage` and `timings` of all answers together; each prompt counts once."""
    times = [answer.timings for answer in answers]
    prompt = sum(answer.prompt_tokens for answer in answers[::choices_per_prompt])
    cached = sum(answer.cached_tokens for answer in answers[::choices_per_prompt])
    generated = sum(answer.generated_tokens for answer in answers)
    thoughts = sum(answer.thought_tokens for answer in answers)
    prefill_s = max(time.prefill_s for time in times)
    decode_s = max(time.decode_s for time in times)
    # The first token of each answer comes from the prefill step.
    decoded = sum(answer.generated_tokens - 1 for answer in answers)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thoughts},
    }
    timings: dict[str, Any] = {
        "cached_tokens": cached,
        "queue_ms": round(1000 * max(time.queue_s for time in times), 3),
        "prefill_ms": round(1000 * prefill_s, 3),
        "prefill_tokens_per_second": _rate(
            sum(answer.prompt_tokens - answer.cached_tokens for answer in answers), prefill_s
        ),
        "decode_ms": round(1000 * decode_s, 3),
        "decode_tokens_per_second": _rate(decoded, decode_s),
    }
    guessed = sum(time.guessed for time in times)
    held_back = sum(time.held_back for time in times)
    if guessed or held_back:
        timings["draft_tokens"] = guessed
        timings["draft_tokens_accepted"] = sum(time.accepted for time in times)
        timings["draft_tokens_held_back"] = held_back
    # The answers ran together, so the one that decoded longest covers nearly all of the time.
    longest = max(times, key=lambda time: time.decode_s)
    if longest.experts is not None:
        timings["experts"] = longest.experts
    if longest.stages is not None:
        timings["stages"] = longest.stages
    if longest.parts is not None:
        timings["parts_ms"] = {part: round(1000 * s, 3) for part, s in longest.parts.items()}
    return {"usage": usage, "timings": timings}


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else None
