"""Service: starts the answers to HTTP requests. Answers: the running answers to one request."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headroom.answers import AnswerDelta, AnswerReader
from headroom.engine.pooling import Vector, check_dimensions, shaped
from headroom.engine.request import (
    GenerationRequest,
    SamplingParams,
    TokenConstraint,
    TokenEvent,
    new_seed,
    with_defaults,
)
from headroom.errors import CapacityError, HeadroomError, RequestError
from headroom.llm import LLM, SEED_BITS
from headroom.options import Options
from headroom.server.holding import EVENTS, WaitingStream, current_hold
from headroom.server.host_memory import giving_back
from headroom.server.metrics import Metrics
from headroom.server.refusals import RefusalError, shutting_down
from headroom.server.request_log import current_record
from headroom.server.schemas import unsupported
from headroom.server.shelf import Lease, Shelf, ShelvedModel
from headroom.text.answer_parser import AnswerParser
from headroom.text.conversation import Conversation
from headroom.text.fill_in import FillIn
from headroom.text.long_texts import check_not_far_beyond

Returned = TypeVar("Returned")
NewParser = Callable[[], AnswerParser | None]
# Events that wait for a client at most; an event with 20 rivals takes about 3 KiB.
UNREAD_EVENTS = 1024
UNREAD_EVENTS_PER_ANSWER = 64
PREPARING_THREADS = 4
MOST_BIASES = 200_000  # of all answers to one HTTP call
# Logprobs of generated tokens in a response that is not streamed: tokens times (top_logprobs + 1).
# So many take 250 MB in memory, as objects and as JSON.
MOST_LOGPROBS = 1 << 18
LEAST_CUT = 4096  # tokens; shorter answers are refused rather than cut for their logprobs
MAX_EMBEDDED_TEXTS = 2048  # in one call; OpenAI's limit
MOST_EMBEDDED_NUMBERS = 1 << 22  # in all vectors of one call; so many take 80 MB as JSON
# Work for calls with larger bodies is done one call after another: a tokenizer may take 300 bytes
# of memory for each byte.
LARGE_BODY_BYTES = 512 << 10
UNTIL_END = -1  # as `max_tokens`: as many tokens as the context holds


def make_requests(
    llm: LLM,
    prompts: Iterable[Sequence[int]],
    settings: Mapping[str, Any],  # fields of SamplingParams; None: the field is left out
    answers_per_prompt: int = 1,
    *,
    prompt_field: str,  # the field of the body that holds the prompts; errors name it
    streams: bool = False,  # the answers are sent token by token, and not held
    # Called for each answer with its `max_tokens`.
    new_constraint: Callable[[int | None], TokenConstraint | None] = lambda most: None,
) -> list[GenerationRequest]:
    """Return the engine's requests: `answers_per_prompt` for each prompt, prompt by prompt.

    The model's own defaults stand for settings that a client leaves out. All requests have one seed
    but different draws, so that answers to equal prompts differ.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    prompts = list(prompts)
    _check_biases(len(given.get("logit_bias", ())), len(prompts) * answers_per_prompt)
    given = with_defaults(llm.default_sampling, {"seed": new_seed(SEED_BITS), **given})
    if given.get("max_tokens") == UNTIL_END:
        given["max_tokens"] = None
    if not streams and given.get("logprobs") is not None:
        rooms = [llm.context - len(prompt) for prompt in prompts]
        given["max_tokens"] = _most_with_logprobs(
            rooms, answers_per_prompt, given["logprobs"], given.get("max_tokens")
        )
    requests: list[GenerationRequest] = []
    for prompt in map(tuple, prompts):
        first = len(requests)
        for draw in range(first, first + answers_per_prompt):
            params = SamplingParams(**{**given, "draw": draw})
            made = llm.request(prompt, params, new_constraint(params.max_tokens))
            if draw > first:
                made = replace(made, prompt_logprobs=requests[first].prompt_logprobs)
            requests.append(made)
        try:
            llm.engine.check(requests[-1])
        except RequestError as error:
            if error.param == "prompt":
                error.param = prompt_field
            raise
    return requests


def _check_biases(biases: int, answers: int) -> None:
    if biases * answers > MOST_BIASES:
        raise RequestError(
            f"logit_bias has {biases} tokens for each of {answers} answers; all together may have "
            f"at most {MOST_BIASES}.",
            hint="Ask for fewer answers at once, or bias fewer tokens.",
            param="logit_bias",
        )


def _most_with_logprobs(rooms: Sequence[int], n: int, top: int, most: int | None) -> int | None:
    """Return the `max_tokens` of answers whose logprobs the server has to hold.

    `rooms` are the tokens that the context leaves after each prompt. An answer that may fill its
    room ends earlier where the limit of logprobs allows LEAST_CUT tokens. Other responses that may
    have more logprobs are refused.
    """
    tokens = sum(room if most is None else min(room, most) for room in rooms)
    wanted = tokens * n * (top + 1)
    if wanted > MOST_LOGPROBS:
        each = MOST_LOGPROBS // (len(rooms) * n * (top + 1))
        if each >= LEAST_CUT and (most is None or most >= max(rooms)):
            return each
        raise RequestError(
            f"The response may have {wanted} logprobs: {tokens} tokens x {n} answers to each "
            f"prompt x {top + 1} for each token; at most {MOST_LOGPROBS} are given at once.",
            hint="Stream the response, give or lower max_tokens, or ask for fewer answers or "
            "logprobs.",
            param="logprobs",
        )
    return most


def fill_in_of(llm: LLM, suffix: str | None) -> FillIn | None:
    """Return the model's fill-in tokens; None without a suffix; refuse a suffix if it has none."""
    if suffix and llm.fill_in is None:
        raise unsupported(
            "suffix",
            f"{llm.name} has no tokens for filling in the middle, so `suffix` cannot be used.",
        )
    return llm.fill_in if suffix else None


def no_parser() -> None:
    """Return None: an answer that continues the prompt's text needs no parser."""


class Answers:
    """The answers to several engine requests, as one stream of deltas that must be closed."""

    def __init__(
        self,
        llm: LLM,
        requests: Sequence[GenerationRequest],
        metrics: Metrics,
        new_parser: NewParser = no_parser,  # called once for each answer
        lease: Lease | None = None,  # keeps the model loaded; released when the answers are closed
        *,
        only_prompts: bool = False,  # report nothing of the generated tokens
    ) -> None:
        assert requests
        self.llm = llm
        self._lease = lease
        self._only_prompts = only_prompts
        self.count = len(requests)
        self.prompt_tokens = len(requests[0].prompt)  # of the first answer
        self.seed = requests[0].params.seed  # of all answers: the client's, or a random one
        self._engine = llm.engine
        self._metrics = metrics
        self._record = current_record()
        self._readers = {
            request.id: AnswerReader(request, llm.tokenizer, llm.engine, index, new_parser())
            for index, request in enumerate(requests)
        }
        self._unfinished = set(self._readers)
        self.is_cut = False  # the answers were cancelled because their client does not read
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent | HeadroomError] = asyncio.Queue()
        self._most_unread = UNREAD_EVENTS + UNREAD_EVENTS_PER_ANSWER * len(requests)
        try:
            for request in requests:
                self._engine.submit(request, self._receive)
                self._record.prompt_tokens += len(request.prompt)
        except HeadroomError:
            self.close()
            raise

    def _receive(self, event: TokenEvent) -> None:
        # The engine's thread calls this; it must not fail if the event loop has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: TokenEvent) -> None:
        if not self._unfinished or self.is_cut:
            return
        if event.token is not None:
            self._record.add_token()
        if self._events.qsize() >= self._most_unread:
            # The engine cannot wait for a client that does not read, and memory is bounded.
            self.is_cut = True
            message = f"The client left {self._events.qsize()} events unread."
            hint = "Read the stream as it comes."
            self.fail(RefusalError(503, "slow_client", message, hint=hint))
            return
        self._events.put_nowait(event)

    async def deltas(self) -> AsyncGenerator[AnswerDelta, None]:
        """Yield the deltas of all answers as they come, until every answer has ended."""
        try:
            while self._unfinished:
                event = await self._events.get()
                if isinstance(event, HeadroomError):
                    raise event
                # After a stop text has ended an answer, the engine may still send a few tokens.
                if event.request_id in self._unfinished:
                    delta = self._read(event)
                    if delta.shows or delta.finish_reason:
                        yield delta
        finally:
            self.close()

    def _read(self, event: TokenEvent) -> AnswerDelta:
        delta = self._readers[event.request_id].read(event)
        if delta.finish_reason == "error":
            raise RefusalError(500, "generation_failed", delta.error or "The engine failed.")
        if delta.finish_reason == "cancelled":
            raise RefusalError(503, "cancelled", "The server cancelled the answer.")
        if delta.finish_reason is not None:
            self._unfinished.discard(event.request_id)
            self._metrics.answer_ended(delta.timings, delta.generated_tokens)
        return _without_tokens(delta) if self._only_prompts else delta

    def fail(self, error: HeadroomError) -> None:
        """Cancel the requests and end the stream with an error."""
        self.close()
        self._events.put_nowait(error)

    def close(self) -> None:
        """Cancel the requests that still run, and release the model."""
        for request_id in self._unfinished:
            self._engine.cancel(request_id)
        if self._lease is not None:
            self._lease.release()


def _without_tokens(delta: AnswerDelta) -> AnswerDelta:
    """Return a delta without its token and text; what it says of the prompt stays."""
    return replace(
        delta,
        text="",
        token=None,
        logprobs=None,
        shown_tokens=(),
        generated_tokens=0,
        finish_reason=None if delta.finish_reason is None else "length",
    )


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embedding vectors of several texts."""

    vectors: list[Vector]  # of length 1
    prompt_tokens: int  # of all texts


def _check_vectors(texts: int, width: int, input_field: str) -> None:
    """Refuse a call for vectors with more numbers than the server gives at once."""
    most = MOST_EMBEDDED_NUMBERS // width
    if texts > most:
        raise RequestError(
            f"{texts} texts were given; with vectors of {width} numbers, at most {most} are "
            "allowed.",
            hint="Send the texts in several requests.",
            param=input_field,
        )


async def _pool(llm: LLM, requests: Sequence[GenerationRequest]) -> list[Vector]:
    """Run requests for vectors and return the vectors in order.

    At most half of the engine's queue is used, so that other clients find room.
    """
    most = max(1, llm.engine.capacity // 2)
    loop, waiting = asyncio.get_running_loop(), deque(requests)
    events: asyncio.Queue[TokenEvent] = asyncio.Queue()
    running: set[str] = set()
    vectors: dict[str, Vector] = {}

    def receive(event: TokenEvent) -> None:
        # The engine's thread calls this; it must not fail if the event loop has ended.
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
                current_record().prompt_tokens += len(waiting[0].prompt)
                running.add(waiting.popleft().id)
            event = await events.get()
            running.discard(event.request_id)
            if event.finish_reason == "cancelled":
                raise RefusalError(503, "cancelled", "The server cancelled the request.")
            if event.vector is None:
                raise RefusalError(500, "generation_failed", event.error or "The engine failed.")
            vectors[event.request_id] = event.vector
    finally:
        for request_id in running:
            llm.engine.cancel(request_id)
    return [vectors[request.id] for request in requests]


class Service:
    """What all endpoints share: the models, the settings, the metrics and the running answers."""

    def __init__(self, shelf: Shelf, options: Options, metrics: Metrics) -> None:
        self.shelf = shelf
        self.options = options
        self.metrics = metrics
        self.stopping = False
        self.uploads: set[asyncio.Timeout] = set()  # of bodies that are being received
        self._ended = False  # `stop` was called
        self._preparing = 0  # requests that are prepared in threads, or wait for that
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, "prepare")
        self._thread_of_large_bodies = ThreadPoolExecutor(1, "prepare-large")
        # Weak references: answers leave the set when nobody reads their stream any more.
        self._running: weakref.WeakSet[Answers] = weakref.WeakSet()

    async def in_thread(self, work: Callable[..., Returned], *given: Any) -> Returned:
        """Return `work(*given)`, computed in a thread, so that other clients are not held up.

        Templates, tokenizers and grammars take seconds for long inputs. As many requests may wait
        for a thread as for the engine. Work for requests with large bodies shares one thread.
        """
        if self._ended:
            raise shutting_down()
        if self._preparing >= self.options.queue:
            raise CapacityError(
                f"{self._preparing} requests are being prepared, which is the limit.",
                hint="Try again later, or raise --queue.",
            )
        self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            large = current_record().body_bytes > LARGE_BODY_BYTES
            threads = self._thread_of_large_bodies if large else self._threads
            return await loop.run_in_executor(threads, giving_back, work, *given)
        finally:
            self._preparing -= 1

    def start(
        self,
        llm: LLM,
        requests: Sequence[GenerationRequest],
        new_parser: NewParser = no_parser,
        *,
        only_prompts: bool = False,  # report nothing of the generated tokens
    ) -> Answers:
        """Hand requests to a model's engine; if it refuses one, all are cancelled."""
        if self.stopping:
            raise shutting_down()
        if len(requests) > (most := llm.engine.capacity):
            raise RequestError(
                f"{len(requests)} answers were asked for; the server gives at most {most} at once.",
                hint="Ask for fewer, or start the server with a larger --queue.",
                param="n",
            )
        lease = self.shelf.hold_again(llm)
        key = current_record().prefix_key
        requests = [replace(request, cache_key=key) for request in requests]
        answers = Answers(llm, requests, self.metrics, new_parser, lease, only_prompts=only_prompts)
        self._running.add(answers)
        return answers

    async def start_chat(
        self,
        llm: LLM,
        chat: Conversation,
        settings: Mapping[str, Any],  # fields of SamplingParams; None: the model's default
        *,
        n: int = 1,
        messages_field: str = "messages",  # the API's field of the conversation; errors name it
        streams: bool = False,  # the answers are sent token by token, and not held
    ) -> Answers:
        """Start `n` answers to a conversation; every chat API calls this."""

        def prepare() -> tuple[list[GenerationRequest], NewParser]:
            try:
                prompt = llm.prepare_chat(chat, must_fit=True)
            except RequestError as error:
                if error.param in ("messages", "prompt"):
                    error.param = messages_field
                raise
            requests = make_requests(
                llm,
                [prompt.tokens],
                settings,
                n,
                prompt_field=messages_field,
                streams=streams,
                new_constraint=prompt.new_constraint,
            )
            return requests, prompt.new_parser

        requests, new_parser = await self.in_thread(prepare)
        return self.start(llm, requests, new_parser)

    async def embed(
        self,
        llm: LLM,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        input_field: str = "input",  # the API's field of the texts; errors name it
    ) -> Embeddings:
        """Return the embedding vectors of texts; several texts run together."""
        if self.stopping:
            raise shutting_down()
        check_dimensions(dimensions, llm.hidden_size)
        _check_vectors(len(texts), dimensions or llm.hidden_size, input_field)

        def prepare() -> list[GenerationRequest]:
            requests = []
            for index, text in enumerate(texts):
                try:
                    if isinstance(text, str):
                        check_not_far_beyond(llm.tokenizer, text, llm.context)
                    request = llm.embedding_request(text)
                    llm.engine.check(request)
                except RequestError as error:
                    error.param = f"{input_field}[{index}]" if len(texts) > 1 else input_field
                    raise
                requests.append(request)
            return requests

        requests = await self.in_thread(prepare)
        found = await _pool(llm, requests)
        return Embeddings(
            vectors=await self.in_thread(lambda: [shaped(each, dimensions) for each in found]),
            prompt_tokens=sum(len(request.prompt) for request in requests),
        )

    def refuse_requests(self) -> None:
        """Refuse new requests, and those whose bodies are being received."""
        self.stopping = True
        self.shelf.stop()
        now = asyncio.get_running_loop().time()
        for upload in self.uploads:
            upload.reschedule(now)

    def stop(self) -> None:
        """End the requests that run."""
        self._ended = True
        for threads in (self._threads, self._thread_of_large_bodies):
            threads.shutdown(wait=False, cancel_futures=True)
        for answers in list(self._running):
            answers.fail(shutting_down())

    async def model(
        self,
        name: str | None,
        *,
        exact: bool = False,
        streams: bool | None = False,
        waiting: WaitingStream = EVENTS,
    ) -> LLM:
        """Return the model of this name, loaded; without a name, the server's first model.

        The model stays loaded until the HTTP request ends. If the request `streams` its answer, its
        client gets signs of life during the load, as `waiting` says. A server with one model
        accepts any name, because agents have names built in, unless `exact` or --strict-model is
        set.
        """
        shelved = self.find_shelved(name, exact=exact)
        if (loading := self.shelf.first_load) is not None:
            raise RefusalError(
                503,
                "loading",
                f"{self.shelf.models[0].name} is being loaded: {loading.share:.0%} are done.",
                hint="Try again in some seconds; GET /health tells when the server is ready.",
            )
        hold = current_hold()
        if hold is None:  # not called by an HTTP request: the answers keep the model loaded
            lease = await self.shelf.hold(shelved)
            lease.release()
            return lease.llm
        if (held := hold.llm_of(shelved)) is not None:
            return held
        if not streams or (shelved.llm is not None and not shelved.leaving):
            lease = await self.shelf.hold(shelved)
        else:
            lease = await hold.wait(self.shelf.hold(shelved), waiting, self.options.keep_alive)
        hold.add(lease)
        return lease.llm

    def find_shelved(self, name: str | None, *, exact: bool = False) -> ShelvedModel:
        """Return the model that a request asks for, loaded or not."""
        shelf = self.shelf
        if not name:
            return shelf.models[0]
        if (shelved := shelf.find(name)) is not None:
            return shelved
        if exact or self.options.strict_model or shelf.several:
            names = ", ".join(map(repr, shelf.names))
            raise RefusalError(
                404,
                "model_not_found",
                f"The model {name[:200]!r} does not exist.",
                hint=f"This server has {names}.",
                param="model",
            )
        return shelf.models[0]
