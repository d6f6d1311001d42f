"""Which models an HTTP request uses: they stay loaded until it ends, and it waits for their loads.

A load may take minutes. A request that asked for server-sent events gets keep-alive comments
meanwhile; if the load fails after the first comment, the error is the last event of the stream.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headroom.llm import LLM
from headroom.server.shelf import Lease, Place
from headroom.server.sse import EVENT_HEADERS, EVENT_TYPE, KEEP_ALIVE

_CURRENT: ContextVar["RequestHold | None"] = ContextVar("hold", default=None)


def current_hold() -> "RequestHold | None":
    """Return what the present HTTP request holds; None outside of a request."""
    return _CURRENT.get()


class RequestHold:
    """The leases of one HTTP request, and its answer as far as it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._leases: list[Lease] = []
        self._began = False  # comments were sent before the endpoint's own answer
        self._answer_is_stream = True  # the endpoint's own answer is a stream of events
        self._error = b""  # the body of an endpoint's answer that is no stream

    def llm_of(self, place: Place) -> LLM | None:
        """Return a model that the request already holds."""
        return next((lease.llm for lease in self._leases if lease.place is place), None)

    def add(self, lease: Lease) -> None:
        """Keep a model loaded until the request ends."""
        self._leases.append(lease)

    def release(self) -> None:
        """Let go of all models."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    async def wait(self, work: Coroutine[Any, Any, Lease], keep_alive_s: float) -> Lease:
        """Return the result of `work`; the client gets a comment every `keep_alive_s` seconds."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=keep_alive_s))[0]:
                await self._comment()
            return task.result()
        finally:
            task.cancel()

    async def _comment(self) -> None:
        if not self._began:
            self._began = True
            headers = {**EVENT_HEADERS, "content-type": EVENT_TYPE}
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def send(self, message: Message) -> None:
        """Send a part of the endpoint's answer, as an event if a stream has begun already."""
        if not self._began:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._answer_is_stream = kind.startswith(EVENT_TYPE)
        elif self._answer_is_stream:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                event = b"event: error\ndata: " + self._error + b"\n\n"
                await self._send({**message, "body": event})


class HoldModels:
    """Middleware that gives every HTTP request a RequestHold and releases it at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hold = RequestHold(send)
        token = _CURRENT.set(hold)
        try:
            await self._app(scope, receive, hold.send)
        finally:
            _CURRENT.reset(token)
            hold.release()
