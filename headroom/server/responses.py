"""/v1/responses: answers a conversation of items, in OpenAI's format, and stores responses."""

import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headroom.errors import HeadroomError
from headroom.server.cut_chats import cut_to_fit
from headroom.server.holding import WaitingStream
from headroom.server.invalid_bodies import short
from headroom.server.json_values import JSONResponse
from headroom.server.offered_tools import OfferedTools
from headroom.server.refusals import RefusalError, problem_of
from headroom.server.responses_body import InputBody, ResponseBody
from headroom.server.responses_input import ItemBody
from headroom.server.responses_output import OutputWriter, ResponseEvent, replay
from headroom.server.responses_record import ResponseRecord, Status
from headroom.server.responses_store import Item, ResponseStore, StoredResponse
from headroom.server.schemas import read_body, unsupported
from headroom.server.service import Answers, Service
from headroom.server.sse import EventStream, event, while_connected

router = APIRouter()

PATH = "/v1/responses"
MAX_LISTED, DEFAULT_LISTED = 100, 20  # input items on one page


class ResponseCancelledError(HeadroomError):
    """A client has cancelled a response."""


@router.post(PATH, response_model=None)
async def create_response(request: Request) -> Response:
    """Answer a conversation of items, as a stream or as one object."""
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    body = await read_body(request, ResponseBody, service.options.max_body)
    prompt = await service.in_thread(Prompt, body, store)
    model = service.find_shelved(body.model).name
    record = ResponseRecord(model, body.asked({}), body.sampling().get("seed"))
    framer = EventFramer(record)
    try:
        llm = await service.model(body.model, streams=body.stream, waiting=framer.waiting())
        chat = prompt.chat
        if body.truncation == "auto":
            chat = await service.in_thread(cut_to_fit, llm, chat, body.max_output_tokens)
        answers = await service.start_chat(
            llm, chat, body.sampling(), messages_field="input", streams=bool(body.stream)
        )
    except Exception as error:
        if not framer.began:
            raise
        failure = framer.frame_all(_failure(record, error))
        return EventStream(failure, service.options.keep_alive, lambda: None)
    record.model, record.asked = llm.name, body.asked(llm.default_sampling)
    record.seed = answers.seed
    writer = OutputWriter(
        prompt.offered,
        shows_thoughts=body.shows_thoughts,
        summarises=body.summarises,
        hides=body.includes_encrypted,
        tokenizer=llm.tokenizer if body.includes_logprobs else None,
    )
    run = ResponseRun(answers, record, writer, store)
    if body.store is not False:
        run.keep(StoredResponse(record, prompt.items, canceller(run), prompt.previous))
    if body.stream:
        events = framer.frame_all(run.events(begun=framer.began))
        return EventStream(events, service.options.keep_alive, run.close, framer.keep_alive)
    try:
        return JSONResponse(await while_connected(request, run.whole()))
    finally:
        run.close()


@router.post(f"{PATH}/input_tokens", response_model=None)
async def count_input_tokens(request: Request) -> dict[str, Any]:
    """Answer with the number of tokens of a prompt."""
    service: Service = request.app.state.service
    body = await read_body(request, InputBody, service.options.max_body)
    asked = await service.in_thread(Prompt, body, request.app.state.responses)
    llm = await service.model(body.model)
    prompt = await service.in_thread(llm.prepare_chat, asked.chat)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@router.post(PATH + "/{response_id}")
async def refuse_other_calls(response_id: str) -> None:
    """Answer that the call does not exist, for `compact` and others that this server has not."""
    raise HTTPException(404)


@router.get(PATH + "/{response_id}", response_model=None)
async def show_response(request: Request, response_id: str) -> Response:
    """Return a stored response, as one object or as a stream."""
    service: Service = request.app.state.service
    store: ResponseStore = request.app.state.responses
    record = store.get(response_id).record
    if request.query_params.get("stream") not in ("true", "1"):
        return JSONResponse(record.shown())
    if record.status == "in_progress":
        raise RefusalError(
            400,
            "invalid_value",
            "The response is still being written; try again when it is complete.",
            param="stream",
        )
    if "starting_after" in request.query_params:
        raise unsupported(
            "starting_after",
            "The stream of a stored response has other events than the first one, so it can only "
            "be read from its start; leave `starting_after` out.",
        )
    events = EventFramer(record).frame_all(_repeated(record))
    return EventStream(events, service.options.keep_alive, lambda: None)


@router.delete(PATH + "/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Delete a stored response; responses that continue it stay."""
    store: ResponseStore = request.app.state.responses
    store.delete(response_id).cancel()
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(PATH + "/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """Cancel a response that is still being written; return it either way."""
    store: ResponseStore = request.app.state.responses
    stored = store.get(response_id)
    stored.cancel()
    return stored.record.shown()


@router.get(PATH + "/{response_id}/input_items", response_model=None)
async def list_input_items(request: Request, response_id: str) -> dict[str, Any]:
    """List the input items of a response, without those of the responses that it continues."""
    store: ResponseStore = request.app.state.responses
    items = list(store.get(response_id).input)
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RefusalError(400, "invalid_value", "`order` must be asc or desc.", param="order")
    limit = query.get("limit", str(DEFAULT_LISTED))
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
    """The prompt of a body, with the items of earlier responses that it refers to."""

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
            elif item.id not in known:  # an item of `previous_response_id` is in the prompt already
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
    """Return a function that cancels a response while it is being written.

    The store keeps the function longer than the run. A weak reference lets the model be freed.
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
        self._unsent: list[ResponseEvent] = []  # events of a response that was cancelled
        record.output = writer.items

    def keep(self, stored: StoredResponse) -> None:
        """Put the response into the store."""
        self._stored = stored
        self._store.add(stored)

    def cancel(self) -> None:
        """Cancel the answer at a client's request; what was written so far stays."""
        if self._record.status == "in_progress":
            self._cut_off()
            self._answers.fail(ResponseCancelledError("The response was cancelled."))

    def close(self) -> None:
        """Stop the model; an unfinished response becomes a cancelled one."""
        self._answers.close()
        if self._record.status == "in_progress":
            self._cut_off()

    async def whole(self) -> dict[str, Any]:
        """Return the complete Response object; after an error, nothing is stored."""
        try:
            async for _ in self._written():
                pass
        except ResponseCancelledError:
            pass
        except BaseException:
            self._store.discard(self._record.id)
            raise
        return self._record.shown()

    async def events(self, *, begun: bool) -> AsyncGenerator[ResponseEvent, None]:
        """Yield events as they come; after an error only the last event follows.

        If `begun`, the first events were sent while the model was loaded.
        """
        for first in () if begun else self._record.first_events():
            yield first
        try:
            async with aclosing(self._written()) as written:
                async for one in written:
                    yield one
        except ResponseCancelledError:
            for one in self._unsent:
                yield one
        except Exception as error:
            for one in self._writer.finish("incomplete"):
                yield one
            self._finish("failed", error)
            yield _error_event(error)
        yield self._record.last_event()

    async def _written(self) -> AsyncGenerator[ResponseEvent, None]:
        async with aclosing(self._answers.deltas()) as deltas:
            async for delta in deltas:
                if self._record.status != "in_progress":
                    continue  # cancelled: the error comes after the deltas that were queued before
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
        """End the open item and the response as cancelled."""
        self._unsent = list(self._writer.finish("incomplete"))
        self._finish("cancelled")


async def _repeated(record: ResponseRecord) -> AsyncGenerator[ResponseEvent, None]:
    for one in record.at_start().first_events():
        yield one
    for one in replay(record.output):
        yield one
    yield record.last_event()


async def _failure(record: ResponseRecord, error: Exception) -> AsyncGenerator[ResponseEvent, None]:
    """Yield the end of a stream whose response failed before the model wrote anything."""
    record.end("failed", problem_of(error))
    yield _error_event(error)
    yield record.last_event()


def _error_event(error: Exception) -> ResponseEvent:
    problem = problem_of(error)
    return {
        "type": "error",
        "code": problem.code,
        "message": problem.message,
        "param": problem.param,
    }


class EventFramer:
    """Numbers the events of a stream from 0, and writes them as server-sent events."""

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record
        self._number = 0

    @property
    def began(self) -> bool:
        """Whether the stream has events."""
        return self._number > 0

    def frame(self, one: ResponseEvent) -> bytes:
        """Return the next event."""
        number = self._number
        self._number += 1
        return event({**one, "sequence_number": number}, one["type"])

    async def frame_all(
        self, events: AsyncGenerator[ResponseEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield all events."""
        async with aclosing(events):
            async for one in events:
                yield self.frame(one)

    def waiting(self) -> WaitingStream:
        """Return how the stream goes on while its model is loaded."""
        return WaitingStream(keep_alive=self.keep_alive)

    def keep_alive(self) -> bytes:
        """Return the first events of the stream, later a repeat of `response.in_progress`.

        Agents end a stream in which no event comes for long; to them a comment is no event.
        """
        _, in_progress = first = list(self._record.at_start().first_events())
        return self.frame(in_progress) if self.began else b"".join(map(self.frame, first))
