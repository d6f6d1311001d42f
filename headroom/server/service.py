"""Service: what every endpoint works with. Answers: what the engine says to one HTTP call."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headroom.answers import AnswerDelta, AnswerReader
from headroom.engine.pooling import Vector, check_dimensions, shaped
from headroom.engine.request import (
    GenerationRequest,
    SamplingParams,
    TokenConstraint,
    TokenEvent,
    new_seed,
)
from headroom.errors import CapacityError, HeadroomError, RequestError
from headroom.formats.sampling import with_defaults
from headroom.llm import LLM, SEED_BITS
from headroom.options import Options
from headroom.server.holding import current_hold
from headroom.server.metrics import Metrics
from headroom.server.refusals import RefusalError
from headroom.server.schemas import unsupported
from headroom.server.shelf import Lease, Place, Shelf
from headroom.text.answer_parser import AnswerParser
from headroom.text.conversation import Conversation
from headroom.text.fill_in import FillIn

NewParser = Callable[[], AnswerParser | None]
UNTIL_END = -1  # as `max_tokens`: as many tokens as the context holds


def make_requests(
    llm: LLM,
    prompts: Iterable[Sequence[int]],
    settings: Mapping[str, Any],  # fields of SamplingParams; None: the field is left out
    answers_per_prompt: int = 1,
    *,
    prompt_field: str,  # the field of the body that the prompts come from, for errors
    # Called for each answer with its `max_tokens`.
    new_constraint: Callable[[int | None], TokenConstraint | None] = lambda most: None,
) -> list[GenerationRequest]:
    """Return the engine's requests: `answers_per_prompt` for each prompt, in this order.

    Settings that a client leaves out are the model's own defaults. All requests have one seed, and
    each has a draw of its own, so that answers to equal prompts differ.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    given = with_defaults(llm.default_sampling, {"seed": new_seed(SEED_BITS), **given})
    if given.get("max_tokens") == UNTIL_END:
        given["max_tokens"] = None
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        for draw in range(len(requests), len(requests) + answers_per_prompt):
            params = SamplingParams(**{**given, "draw": draw})
            requests.append(llm.request(prompt, params, new_constraint(params.max_tokens)))
        try:
            llm.engine.check(requests[-1])
        except RequestError as error:
            if error.param == "prompt":
                error.param = prompt_field
            raise
    return requests


def fill_in_of(llm: LLM, suffix: str | None) -> FillIn | None:
    """Return how the model fills the gap before a suffix, if there is one, or refuse the suffix."""
    if suffix and llm.fill_in is None:
        raise unsupported(
            "suffix",
            f"{llm.name} has no tokens to fill a gap between two texts, so it takes no `suffix`.",
        )
    return llm.fill_in if suffix else None


def no_parser() -> None:
    """Return the parser of an answer that continues the prompt's text: none."""


class Answers:
    """The answers to several requests as one stream of deltas; its reader must close it."""

    def __init__(
        self,
        llm: LLM,
        requests: Sequence[GenerationRequest],
        metrics: Metrics,
        new_parser: NewParser = no_parser,  # called once for each answer
        lease: Lease | None = None,  # keeps the model loaded; released when the answers are closed
    ) -> None:
        assert requests
        self.llm = llm
        self._lease = lease
        self.count = len(requests)
        self.prompt_tokens = len(requests[0].prompt)  # of the first answer
        self.seed = requests[0].params.seed  # one for all, the client's or a drawn one
        self._engine = llm.engine
        self._metrics = metrics
        self._readers = {
            request.id: AnswerReader(request, llm.tokenizer, llm.engine, index, new_parser())
            for index, request in enumerate(requests)
        }
        self._unfinished = set(self._readers)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent | HeadroomError] = asyncio.Queue()
        try:
            for request in requests:
                self._engine.submit(request, self._receive)
        except HeadroomError:
            self.close()
            raise

    def _receive(self, event: TokenEvent) -> None:
        # The engine's thread calls this, and must not fail if the event loop has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def deltas(self) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the deltas of all answers as they come, until every answer has ended."""
        try:
            while self._unfinished:
                event = await self._events.get()
                if isinstance(event, HeadroomError):
                    raise event
                # The engine may generate a few tokens after a stop text has ended an answer.
                if event.request_id in self._unfinished:
                    delta = self._read(event)
                    if delta.adds or delta.finish_reason:
                        yield delta
        finally:
            self.close()

    def _read(self, event: TokenEvent) -> AnswerDelta:
        delta = self._readers[event.request_id].read(event)
        if delta.finish_reason == "error":
            raise RefusalError(500, "generation_failed", delta.error or "The engine failed.")
        if delta.finish_reason == "cancelled":
            raise RefusalError(503, "cancelled", "The answer was cancelled by the server.")
        if delta.finish_reason is not None:
            self._unfinished.discard(event.request_id)
            self._metrics.answer_ended(delta.timings, delta.generated_tokens)
        return delta

    def fail(self, error: HeadroomError) -> None:
        """Cancel the requests and end the stream with an error."""
        self.close()
        self._events.put_nowait(error)

    def close(self) -> None:
        """Cancel the requests that still run."""
        for request_id in self._unfinished:
            self._engine.cancel(request_id)
        if self._lease is not None:
            self._lease.release()


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of several texts."""

    vectors: list[Vector]  # of length 1
    prompt_tokens: int  # of all texts


async def _pool(llm: LLM, requests: Sequence[GenerationRequest]) -> list[Vector]:
    """Run requests for vectors, at most half as many at once as the engine takes in all.

    The other half of its queue is for other clients.
    """
    most = max(1, llm.engine.capacity // 2)
    loop, waiting = asyncio.get_running_loop(), deque(requests)
    events: asyncio.Queue[TokenEvent] = asyncio.Queue()
    running: set[str] = set()
    vectors: dict[str, Vector] = {}

    def receive(event: TokenEvent) -> None:
        # The engine's thread calls this, and must not fail if the event loop has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        while waiting or running:
            while waiting and len(running) < most:
                try:
                    llm.engine.submit(waiting[0], receive)
                except CapacityError:
                    if not running:
                        raise
                    break
                running.add(waiting.popleft().id)
            event = await events.get()
            running.discard(event.request_id)
            if event.finish_reason == "cancelled":
                raise RefusalError(503, "cancelled", "The request was cancelled by the server.")
            if event.vector is None:
                raise RefusalError(500, "generation_failed", event.error or "The engine failed.")
            vectors[event.request_id] = event.vector
    finally:
        for request_id in running:
            llm.engine.cancel(request_id)
    return [vectors[request.id] for request in requests]


class Service:
    """What every endpoint works with: models, settings, metrics, and the running answers."""

    def __init__(self, models: Shelf | LLM, options: Options, metrics: Metrics) -> None:
        self.shelf = models if isinstance(models, Shelf) else Shelf.of_loaded(models, options)
        self.options = options
        self.metrics = metrics
        self.stopping = False
        # Weak references: answers leave the set when their stream is over and freed.
        self._running: weakref.WeakSet[Answers] = weakref.WeakSet()

    def start(
        self,
        llm: LLM,
        requests: Sequence[GenerationRequest],
        new_parser: NewParser = no_parser,
    ) -> Answers:
        """Hand requests to a model's engine; if it refuses one, the others are cancelled."""
        if self.stopping:
            raise _shutting_down()
        if len(requests) > (most := llm.engine.capacity):
            raise RequestError(
                f"{len(requests)} answers are asked for, and the server takes {most} at once.",
                hint="Ask for fewer, or start the server with a larger --queue.",
                param="n",
            )
        lease = self.shelf.hold_again(llm)
        answers = Answers(llm, requests, self.metrics, new_parser, lease)
        self._running.add(answers)
        return answers

    async def start_chat(
        self,
        llm: LLM,
        chat: Conversation,
        settings: Mapping[str, Any],  # fields of SamplingParams; None: the model's default
        *,
        n: int = 1,
        messages_field: str = "messages",  # the API's field of the conversation, for errors
    ) -> Answers:
        """Start `n` answers to a conversation; every chat API goes this way."""

        def prepare() -> tuple[list[GenerationRequest], NewParser]:
            try:
                prompt = llm.prepare_chat(chat)
            except RequestError as error:
                if error.param == "messages":
                    error.param = messages_field
                raise
            requests = make_requests(
                llm,
                [prompt.tokens],
                settings,
                n,
                prompt_field=messages_field,
                new_constraint=prompt.new_constraint,
            )
            return requests, prompt.new_parser

        # Encoding a long prompt takes a while; in a thread it does not hold up other clients.
        requests, new_parser = await asyncio.to_thread(prepare)
        return self.start(llm, requests, new_parser)

    async def embed(
        self,
        llm: LLM,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        input_field: str = "input",  # the API's field of the texts, for errors
    ) -> Embeddings:
        """Return the vectors of texts; the engine runs as many together as it takes."""
        if self.stopping:
            raise _shutting_down()
        check_dimensions(dimensions, llm.hidden_size)

        def prepare() -> list[GenerationRequest]:
            requests = [llm.embedding_request(text) for text in texts]
            for index, request in enumerate(requests):
                try:
                    llm.engine.check(request)
                except RequestError as error:
                    error.param = f"{input_field}[{index}]" if len(texts) > 1 else input_field
                    raise
            return requests

        requests = await asyncio.to_thread(prepare)
        found = await _pool(llm, requests)
        return Embeddings(
            vectors=[shaped(vector, dimensions) for vector in found],
            prompt_tokens=sum(len(request.prompt) for request in requests),
        )

    def stop(self) -> None:
        """Take no more requests and end those that run."""
        self.stopping = True
        self.shelf.stop()
        for answers in list(self._running):
            answers.fail(_shutting_down())

    async def model(
        self, name: str | None, *, exact: bool = False, streams: bool | None = False
    ) -> LLM:
        """Return the model of this name, after loading it; a request need not name one.

        The model stays loaded until the HTTP request ends. If the request `streams` server-sent
        events, its client gets comments while the model is loaded. An only model also answers to
        other names, because agents have names built in, unless `exact` or --strict-model is given.
        """
        place = self.place(name, exact=exact)
        hold = current_hold()
        if hold is None:  # no HTTP request: the answers keep the model loaded
            lease = await self.shelf.hold(place)
            lease.release()
            return lease.llm
        if (held := hold.llm_of(place)) is not None:
            return held
        if not streams or (place.llm is not None and not place.leaving):
            lease = await self.shelf.hold(place)
        else:
            lease = await hold.wait(self.shelf.hold(place), self.options.keep_alive)
        hold.add(lease)
        return lease.llm

    def place(self, name: str | None, *, exact: bool = False) -> Place:
        """Return the place of the model that a request asks for, loaded or not."""
        shelf = self.shelf
        if not name:
            return shelf.places[0]
        if (place := shelf.find(name)) is not None:
            return place
        if exact or self.options.strict_model or shelf.several:
            names = ", ".join(map(repr, shelf.names))
            raise RefusalError(
                404,
                "model_not_found",
                f"The model {name[:200]!r} does not exist.",
                hint=f"This server has {names}.",
                param="model",
            )
        return shelf.places[0]


def _shutting_down() -> RefusalError:
    return RefusalError(503, "shutting_down", "The server is shutting down.")
