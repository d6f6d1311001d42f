"""/v1/responses: answers items with items, in OpenAI's format, and keeps what it answered."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from headroom.answers import AnswerToken
from headroom.engine.request import TokenLogprobs
from headroom.errors import HeadroomError
from headroom.llm import LLM
from headroom.server.openai_shared import logprob_number, token_text
from headroom.server.refusals import RefusalError, problem_of
from headroom.server.responses_body import InputBody, ResponseBody
from headroom.server.responses_input import ItemBody
from headroom.server.responses_output import Event, OutputWriter, replay
from headroom.server.responses_record import ResponseRecord, Status
from headroom.server.responses_store import Item, ResponseStore, StoredResponse
from headroom.server.responses_tools import OfferedTools
from headroom.server.schemas import read_body, short, unsupported
from headroom.server.service import Answers, Service
from headroom.server.sse import EventStream, event, while_connected
from headroom.text.conversation import Conversation
from headroom.text.tokenizer import Tokenizer

router = APIRouter()

PATH = "/v1/responses"
MAX_LISTED, USUALLY_LISTED = 100, 20  # input items in one answer
# Where input is cut to fit, this share of the context is left for the answer, at most.
ANSWER_SHARE = 8


class ResponseCancelledError(HeadroomError):
    """A client has cancelled a response."""


@router.post(PATH, response_model=None)
async def create_response(request: Request) -> Response:
    """Answer items, as a stream or as one object."""
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    body = await read_body(request, ResponseBody, service.options.max_body)
    prompt = Prompt(body, store)
    llm = await service.model(body.model, streams=body.stream)
    chat = prompt.chat
    if body.truncation == "auto":
        chat = await asyncio.to_thread(cut_to_fit, llm, chat, body.max_output_tokens)
    answers = await service.start_chat(llm, chat, body.sampling(), messages_field="input")
    record = ResponseRecord(llm.name, body.asked(llm.default_sampling), answers.seed)
    writer = OutputWriter(
        prompt.offered,
        shows_thoughts=body.shows_thoughts,
        summarises=body.summarises,
        hides=body.includes_encrypted,
        **({"logprobs": LogprobWriter(llm.tokenizer)} if body.includes_logprobs else {}),
    )
    run = ResponseRun(answers, record, writer, store)
    if body.store is not False:
        run.keep(StoredResponse(record, prompt.items, canceller(run), prompt.previous))
    if body.stream:
        return EventStream(_framed(run.events()), service.options.keep_alive, run.close)
    try:
        return JSONResponse(await while_connected(request, run.whole()))
    finally:
        run.close()


@router.post(f"{PATH}/input_tokens", response_model=None)
async def count_input_tokens(request: Request) -> dict[str, Any]:
    """Answer with the number of tokens of a prompt."""
    service: Service = request.app.state.service
    body = await read_body(request, InputBody, service.options.max_body)
    chat = Prompt(body, request.app.state.responses).chat
    llm = await service.model(body.model)
    prompt = await asyncio.to_thread(llm.prepare_chat, chat)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@router.get(PATH + "/{response_id}", response_model=None)
async def show_response(request: Request, response_id: str) -> Response:
    """Show a response that was kept, or repeat its stream."""
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    record = store.get(response_id).record
    if request.query_params.get("stream") not in ("true", "1"):
        return JSONResponse(record.shown())
    if record.status == "in_progress":
        raise RefusalError(
            400, "invalid_value", "The response is still written; ask later.", param="stream"
        )
    if "starting_after" in request.query_params:
        raise unsupported(
            "starting_after",
            "A repeated stream has fewer and longer deltas, so its events are numbered anew.",
        )
    events = _framed(_repeated(record))
    return EventStream(events, service.options.keep_alive, lambda: None)


@router.delete(PATH + "/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Keep a response no longer; responses that continue it are not touched."""
    store: ResponseStore = request.app.state.responses
    store.delete(response_id).cancel()
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(PATH + "/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """End a response that is still written; one that has ended is shown as it is."""
    store: ResponseStore = request.app.state.responses
    stored = store.get(response_id)
    stored.cancel()
    return stored.record.shown()


@router.get(PATH + "/{response_id}/input_items", response_model=None)
async def list_input_items(request: Request, response_id: str) -> dict[str, Any]:
    """List the items that a response answered; those of responses before it are not repeated."""
    store: ResponseStore = request.app.state.responses
    items = list(store.get(response_id).input)
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RefusalError(400, "invalid_value", "`order` must be asc or desc.", param="order")
    limit = query.get("limit", str(USUALLY_LISTED))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
        raise RefusalError(
            400,
            "invalid_value",
            f"`limit` is {short(limit)!r}; it must be from 1 to {MAX_LISTED}.",
            param="limit",
        )
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RefusalError(
                400, "invalid_value", f"There is no item {short(after)!r}.", param="after"
            )
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


class Prompt:
    """What a body asks, with the items of earlier responses that it refers to."""

    def __init__(self, body: InputBody, store: ResponseStore) -> None:
        self.previous = store.previous(body.previous_response_id)
        before = [] if self.previous is None else self.previous.items()
        known = {item["id"] for item in before}
        self.items: list[Item] = []
        given: list[ItemBody] = []
        for index, item in enumerate(body.input or ()):
            if item.kind != "item_reference":
                given.append(item)
                self.items.append(item.shown())
            elif item.id not in known:  # otherwise it is there already
                found = _referred(item.id or "", index, store)
                given.append(ItemBody.model_validate(found))
                self.items.append(found)
        earlier = [ItemBody.model_validate(item) for item in before]
        self.offered: OfferedTools = body.offered_tools([*earlier, *given])
        self.chat = body.conversation(earlier, given, self.offered)


def _referred(item_id: str, index: int, store: ResponseStore) -> Item:
    found = store.find_item(item_id)
    if found is None:
        raise RefusalError(
            404,
            "not_found",
            f"Item with id {short(item_id)!r} not found.",
            hint="Send the whole item.",
            param=f"input[{index}].id",
        )
    return found


def canceller(run: "ResponseRun") -> Callable[[], None]:
    """Return what cancels a response while it is written.

    The store keeps it longer, and must not keep the model in memory: it holds the run weakly.
    """
    running = weakref.ref(run)

    def cancel() -> None:
        if (found := running()) is not None:
            found.cancel()

    return cancel


class ResponseRun:
    """One response while the model writes it."""

    def __init__(
        self,
        answers: Answers,
        record: ResponseRecord,
        writer: OutputWriter,
        store: ResponseStore,
    ) -> None:
        self._answers = answers
        self._record = record
        self._writer = writer
        self._store = store
        self._stored: StoredResponse | None = None
        self._unsent: list[Event] = []  # events of a response that was cancelled
        record.output = writer.items

    def keep(self, stored: StoredResponse) -> None:
        """Put the response into the store."""
        self._stored = stored
        self._store.add(stored)

    def cancel(self) -> None:
        """End the answer for a client that asked so; what was written so far stays."""
        if self._record.status == "in_progress":
            self._cut_off()
            self._answers.fail(ResponseCancelledError("The response was cancelled."))

    def close(self) -> None:
        """Stop the model; a response that nobody waits for any more counts as cancelled."""
        self._answers.close()
        if self._record.status == "in_progress":
            self._cut_off()

    async def whole(self) -> dict[str, Any]:
        """Return the Response object once it is whole; an error is raised and leaves no trace."""
        try:
            async for _ in self._written():
                pass
        except ResponseCancelledError:
            pass
        except BaseException:
            self._store.discard(self._record.id)
            raise
        return self._record.shown()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield all events as they come; an error becomes the last of them."""
        for first in self._record.first_events():
            yield first
        try:
            async with aclosing(self._written()) as written:
                async for one in written:
                    yield one
        except ResponseCancelledError:
            for one in self._unsent:
                yield one
        except Exception as error:
            problem = problem_of(error)
            for one in self._writer.finish("incomplete"):
                yield one
            self._finish("failed", error)
            yield {
                "type": "error",
                "code": problem.code,
                "message": problem.message,
                "param": problem.param,
            }
        yield self._record.last_event()

    async def _written(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                if self._record.status != "in_progress":
                    continue  # it was cancelled; the error that says so comes after these deltas
                self._record.last = replace(delta, prompt_logprobs=())
                for one in self._writer.add(delta):
                    yield one
                if delta.finish_reason is not None:
                    cut = delta.finish_reason == "length"
                    for one in self._writer.finish("incomplete" if cut else "completed"):
                        yield one
                    self._finish("incomplete" if cut else "completed")

    def _finish(self, status: Status, error: Exception | None = None) -> None:
        self._record.end(status, None if error is None else problem_of(error))
        if self._stored is not None:
            self._store.changed(self._stored)

    def _cut_off(self) -> None:
        """End the open item and the response, which was cancelled."""
        self._unsent = list(self._writer.finish("incomplete"))
        self._finish("cancelled")


async def _repeated(record: ResponseRecord) -> AsyncGenerator[Event, None]:
    for one in record.at_start().first_events():
        yield one
    for one in replay(record.output):
        yield one
    yield record.last_event()


async def _framed(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """Number events from 0 and write them as server-sent events."""
    number = 0
    async with aclosing(events):
        async for one in events:
            yield event({**one, "sequence_number": number}, one["type"])
            number += 1


def cut_to_fit(llm: LLM, chat: Conversation, max_tokens: int | None) -> Conversation:
    """Return a chat without as many of its oldest turns as the context cannot hold.

    A turn is a message of the user with all that follows it. Instructions at the beginning and the
    last turn stay.
    """
    room = max(1, llm.context // ANSWER_SHARE)
    if max_tokens is not None and max_tokens > 0:
        room = min(room, max_tokens)
    kept = 1 if chat.messages[0]["role"] == "system" else 0
    starts = [
        place
        for place, message in enumerate(chat.messages)
        if place >= kept and message["role"] == "user"
    ]

    def without(turns: int) -> Conversation:
        rest = chat.messages[starts[turns] :] if turns else chat.messages[kept:]
        return replace(chat, messages=[*chat.messages[:kept], *rest])

    def fits(turns: int) -> bool:
        return len(llm.prepare_chat(without(turns)).tokens) + room <= llm.context

    # The fewest turns that must go, found by halving: each trial encodes the whole prompt.
    low, high = 0, max(0, len(starts) - 1)
    if fits(0):
        return chat
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return without(low)


class LogprobWriter:
    """Writes the log probabilities of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, tokens: Sequence[AnswerToken]) -> list[dict[str, Any]]:
        """Return one entry for each token, with the likeliest tokens in its place."""
        written = []
        for token in tokens:
            known = token.logprobs or TokenLogprobs(0.0, ())
            top = [self._entry(rival, logprob) for rival, logprob in known.top]
            written.append({**self._entry(token.id, known.logprob), "top_logprobs": top})
        return written

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token),
            "logprob": logprob_number(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
