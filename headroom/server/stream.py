"""From requests to answers as they come: the engine's events become text, whatever the dialect."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headroom.engine.request import GenerationRequest, Timings, TokenEvent, TokenLogprobs
from headroom.errors import HeadroomError, RequestError
from headroom.llm import LLM
from headroom.options import Options
from headroom.server.metrics import Metrics
from headroom.server.refusals import RefusalError
from headroom.text.detokenizer import Detokenizer
from headroom.text.stops import StopFinder
from headroom.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of an answer, for clients that ask for logprobs."""

    id: int
    offset: int  # characters of the answer before it
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended and what it took."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    generated_tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to one of the answers."""

    index: int  # which answer
    text: str
    tokens: tuple[AnswerToken, ...]  # those whose text is now shown
    prompt_logprobs: tuple[TokenLogprobs | None, ...]  # with an answer's first delta, if asked for
    end: AnswerEnd | None  # with an answer's last delta


class AnswerReader:
    """Reads one answer's events: hides stop tokens and stop texts, keeps tokens with their text."""

    def __init__(self, index: int, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.index = index
        self.stopped = False  # a stop text was found
        self._detokenizer = Detokenizer(tokenizer)
        self._finder = StopFinder(stops)
        self._read = 0  # characters that tokens stood for so far
        self._shown = 0  # characters that were given out
        self._held: list[AnswerToken] = []  # tokens whose text is not yet given out

    def read(self, event: TokenEvent) -> Delta:
        """Return what an event adds; after a delta with an end there is nothing to read."""
        text = self._take(event)
        if event.finish_reason is not None and not self.stopped:
            text += self._show(self._detokenizer.finish())
        if event.finish_reason is not None and not self.stopped:
            text += self._finder.finish()
        self._shown += len(text)
        end = self._end(event)
        tokens = self._release(all_of_them=end is not None and not self.stopped)
        return Delta(self.index, text, tokens, event.prompt_logprobs, end)

    def _take(self, event: TokenEvent) -> str:
        # The token that ends an answer is no part of it, whatever its kind.
        if event.token is None or event.finish_reason == "stop":
            return ""
        self._held.append(AnswerToken(event.token, self._read, event.logprobs))
        return self._show(self._detokenizer.push(event.token))

    def _show(self, text: str) -> str:
        self._read += len(text)
        shown = self._finder.push(text)
        self.stopped = self._finder.stopped
        return shown

    def _release(self, *, all_of_them: bool) -> tuple[AnswerToken, ...]:
        ready = 0
        while ready < len(self._held) and (all_of_them or self._held[ready].offset < self._shown):
            ready += 1
        released, self._held = self._held[:ready], self._held[ready:]
        return tuple(released)

    def _end(self, event: TokenEvent) -> AnswerEnd | None:
        reason = "stop" if self.stopped else event.finish_reason
        if reason is None:
            return None
        if reason == "error":
            raise RefusalError(500, "generation_failed", event.error or "The engine failed.")
        if reason == "cancelled":
            raise RefusalError(503, "cancelled", "The answer was cancelled by the server.")
        timings = event.timings or Timings(0.0, 0.0, 0.0)
        return AnswerEnd(reason, event.prompt_tokens, event.generated_tokens, timings)


class Answers:
    """Several requests' answers as one stream of deltas; who leaves the stream must close it."""

    def __init__(self, llm: LLM, requests: Sequence[GenerationRequest], metrics: Metrics) -> None:
        self._engine = llm.engine
        self._metrics = metrics
        self._readers = {
            request.id: AnswerReader(index, llm.tokenizer, request.params.stop)
            for index, request in enumerate(requests)
        }
        self._unfinished = set(self._readers)
        self._stopped: dict[str, Delta] = {}  # ends at stop texts, until the engine told their cost
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent | HeadroomError] = asyncio.Queue()
        try:
            for request in requests:
                self._engine.submit(request, self._receive)
        except HeadroomError:
            self.close()
            raise

    def _receive(self, event: TokenEvent) -> None:
        # Runs on the engine's thread, which must not suffer from a loop that has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield what the engine adds, answer by answer as it comes, until all have ended."""
        try:
            while self._unfinished:
                event = await self._events.get()
                if isinstance(event, HeadroomError):
                    raise event
                # After a stop text the engine may have made a few tokens more.
                if event.request_id in self._unfinished:
                    delta = self._read(event)
                    if delta.text or delta.tokens or delta.prompt_logprobs or delta.end:
                        yield delta
        finally:
            self.close()

    def _read(self, event: TokenEvent) -> Delta:
        request_id, reader = event.request_id, self._readers[event.request_id]
        if request_id in self._stopped:
            delta = self._with_cost(event)
        else:
            delta = reader.read(event)
            if delta.end is not None and event.finish_reason is None:
                # A stop text, of which the engine knows nothing.
                self._engine.cancel(request_id)
                if self._engine.tells_experts:
                    self._stopped[request_id] = Delta(reader.index, "", (), (), delta.end)
                    return replace(delta, end=None)
        if delta.end is not None:
            self._unfinished.discard(request_id)
            self._metrics.answer_ended(delta.end.timings, delta.end.generated_tokens)
        return delta

    def _with_cost(self, event: TokenEvent) -> Delta:
        """Return the end of an answer at a stop text, if this is the engine's last of it."""
        delta = self._stopped[event.request_id]
        assert delta.end is not None
        if event.finish_reason is None:
            return replace(delta, end=None)
        experts = event.timings.experts if event.timings is not None else None
        timings = replace(delta.end.timings, experts=experts)
        return replace(delta, end=replace(delta.end, timings=timings))

    def fail(self, error: HeadroomError) -> None:
        """End the stream with an error, and the requests behind it."""
        self.close()
        self._events.put_nowait(error)

    def close(self) -> None:
        """Stop the requests that still run."""
        for request_id in self._unfinished:
            self._engine.cancel(request_id)


class Service:
    """What every endpoint works with: the model, its settings, its counters, who is served."""

    def __init__(self, llm: LLM, options: Options, metrics: Metrics) -> None:
        self.llm = llm
        self.options = options
        self.metrics = metrics
        self.stopping = False
        # An answer leaves by itself when its stream is over and forgotten.
        self._running: weakref.WeakSet[Answers] = weakref.WeakSet()

    def start(self, requests: Sequence[GenerationRequest]) -> Answers:
        """Hand requests to the engine, all or none of them."""
        if self.stopping:
            raise _shutting_down()
        if len(requests) > (most := self.llm.engine.capacity):
            raise RequestError(
                f"{len(requests)} answers are asked for, and the server takes {most} at once.",
                hint="Ask for fewer, or start the server with a larger --queue.",
                param="n",
            )
        answers = Answers(self.llm, requests, self.metrics)
        self._running.add(answers)
        return answers

    def stop(self) -> None:
        """Take no more requests and end those that run."""
        self.stopping = True
        for answers in list(self._running):
            answers.fail(_shutting_down())

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the one served; none named is as good."""
        if name and name != self.llm.name:
            raise RefusalError(
                404,
                "model_not_found",
                f"The model {name[:200]!r} does not exist.",
                hint=f"This server has {self.llm.name!r}.",
                param="model",
            )

    def check_prompt(self, tokens: Sequence[int], param: str) -> None:
        """Refuse a prompt that is empty, too long or not of this vocabulary."""
        vocab_size, context = self.llm.vocab_size, self.llm.context
        if not tokens:
            raise RequestError("The prompt is empty.", param=param)
        if max(tokens) >= vocab_size or min(tokens) < 0:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise RequestError(
                f"There is no token {wrong}; the vocabulary has {vocab_size}.", param=param
            )
        if len(tokens) >= context:
            raise RefusalError(
                400,
                "context_length_exceeded",
                f"The prompt has {len(tokens)} tokens and the context holds {context}, "
                "the answer included.",
                hint="Shorten the prompt, or start the server with a larger --context.",
                param=param,
            )


def _shutting_down() -> RefusalError:
    return RefusalError(503, "shutting_down", "The server is shutting down.")
