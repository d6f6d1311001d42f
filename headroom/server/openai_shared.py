"""What OpenAI's chat and completions have in common: parameters, counts, times, events."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headroom import __version__
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.errors import RequestError
from headroom.server.refusals import problem_of
from headroom.server.schemas import GenerationBody
from headroom.server.sse import EventStream, event, while_connected
from headroom.server.stream import AnswerEnd, Answers, Delta, Service
from headroom.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
FINGERPRINT = f"headroom-{__version__}"
SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "frequency_penalty", "presence_penalty", "penalty_window", "logit_bias", "ignore_eos", "stop",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every object and chunk of one answer begins with."""

    id: str
    object: str
    model: str
    seed: int  # the one given or drawn, so that any answer can be had again
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole object or chunk."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": list(choices),
            **more,
        }


class Writer(Protocol):
    """How one endpoint writes an answer's choices."""

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that opens a streamed answer, before its first token."""

    def piece(self, delta: Delta) -> dict[str, Any]:
        """Return the choice that adds to a streamed answer."""

    def last(self, delta: Delta) -> dict[str, Any]:
        """Return the choice that ends a streamed answer."""

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice of a whole answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """Requests of one body and how their answers are written."""

    body: GenerationBody
    requests: Sequence[GenerationRequest]
    head: Head
    writer: Writer

    def totals(self, ends: Mapping[int, AnswerEnd]) -> dict[str, Any]:
        """Return what the last chunk or the whole object says of all answers together."""
        in_order = [ends[index] for index in sorted(ends)]
        return {**usage_and_timings(in_order, self.body.n or 1), "seed": self.head.seed}


async def respond(request: Request, service: Service, job: Job) -> Response:
    """Run a job and answer with its stream or its whole."""
    answers = service.start(job.requests)
    if job.body.stream:
        events = _events(_chunks(answers, job))
        return EventStream(events, service.options.keep_alive, answers.close)
    try:
        return JSONResponse(await while_connected(request, _whole(answers, job)))
    finally:
        answers.close()


async def _events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Frame chunks as events; an error after the stream began becomes the last of them."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield event(chunk)
    except Exception as error:
        yield event(problem_of(error).body())
    else:
        yield DONE


async def _chunks(answers: Answers, job: Job) -> AsyncGenerator[dict[str, Any], None]:
    writer, with_usage = job.writer, job.body.include_usage
    usage: dict[str, Any] = {"usage": None} if with_usage else {}
    ends: dict[int, AnswerEnd] = {}
    for index in range(len(job.requests)):
        if (opening := writer.first(index)) is not None:
            yield job.head.wrap([opening], **usage)
    async with aclosing(answers.deltas()) as deltas:
        async for delta in deltas:
            if delta.text or delta.tokens or delta.prompt_logprobs:
                yield job.head.wrap([writer.piece(delta)], **usage)
            if delta.end is None:
                continue
            ends[delta.index] = delta.end
            more = dict(usage)
            if len(ends) == len(job.requests) and not with_usage:
                more = job.totals(ends)
                del more["usage"]
            yield job.head.wrap([writer.last(delta)], **more)
    if with_usage:
        yield job.head.wrap([], **job.totals(ends))


async def _whole(answers: Answers, job: Job) -> dict[str, Any]:
    parts: dict[int, list[Delta]] = {index: [] for index in range(len(job.requests))}
    async with aclosing(answers.deltas()) as deltas:
        async for delta in deltas:
            parts[delta.index].append(delta)
    merged = [_merge(of_one) for of_one in parts.values()]
    ends = {delta.index: delta.end for delta in merged if delta.end is not None}
    return job.head.wrap([job.writer.whole(delta) for delta in merged], **job.totals(ends))


def _merge(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        prompt_logprobs=tuple(item for delta in deltas for item in delta.prompt_logprobs),
        end=deltas[-1].end,
    )


def make_requests(
    service: Service, prompts: Iterable[Sequence[int]], body: GenerationBody, **settings: Any
) -> list[GenerationRequest]:
    """Return the engine's requests: each prompt n times, drawn apart with the same seed."""
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    vocab_size = service.llm.vocab_size
    if outside := [token for token in body.logit_bias if token >= vocab_size]:
        raise RequestError(
            f"There is no token {outside[0]}; the vocabulary has {vocab_size}.", param="logit_bias"
        )
    draws = [SamplingParams(**{**given, **settings, "draw": draw}) for draw in range(body.n or 1)]
    return [service.llm.request(prompt, params) for prompt in prompts for params in draws]


def seed_of(body: GenerationBody) -> int:
    """Return the seed that was given, or a fresh one."""
    return secrets.randbits(53) if body.seed is None else body.seed  # 53 bits: exact in JavaScript


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; bytes that are no whole characters are spelled out."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def logprob_number(value: float) -> float:
    """Return a logprob that JSON can carry."""
    return max(value, LEAST_LOGPROB)


def usage_and_timings(ends: Sequence[AnswerEnd], choices_per_prompt: int) -> dict[str, Any]:
    """Return `usage` and `timings` of all answers together; a prompt counts once."""
    prompt = sum(end.prompt_tokens for end in ends[::choices_per_prompt])
    generated = sum(end.generated_tokens for end in ends)
    prefill_s = max(end.timings.prefill_s for end in ends)
    decode_s = max(end.timings.decode_s for end in ends)
    decoded = sum(end.generated_tokens - 1 for end in ends)  # the first token is the prefill's
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    timings: dict[str, Any] = {
        "queue_ms": round(1000 * max(end.timings.queue_s for end in ends), 3),
        "prefill_ms": round(1000 * prefill_s, 3),
        "prefill_tokens_per_second": _rate(sum(end.prompt_tokens for end in ends), prefill_s),
        "decode_ms": round(1000 * decode_s, 3),
        "decode_tokens_per_second": _rate(decoded, decode_s),
    }
    longest = max(ends, key=lambda end: end.timings.decode_s)  # all run in its time, more or less
    if longest.timings.experts is not None:
        timings["experts"] = longest.timings.experts
    return {"usage": usage, "timings": timings}


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else None
