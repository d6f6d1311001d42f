"""RequestHold: keeps the models that an HTTP request uses loaded until the request ends.

Loading a model may take minutes. A client that asked for a stream gets signs of life meanwhile:
comments between server-sent events, or lines that add nothing. If the load then fails, the error
is the last event or line of the stream.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headroom.llm import LLM
from headroom.server.shelf import Lease, ShelvedModel
from headroom.server.sse import EVENT_HEADERS, EVENT_TYPE, KEEP_ALIVE

_CURRENT: ContextVar["RequestHold | None"] = ContextVar("hold", default=None)


def current_hold() -> "RequestHold | None":
    """Return the hold of the current HTTP request; None outside of a request."""
    return _CURRENT.get()


@dataclass(frozen=True, slots=True)
class WaitingStream:
    """How a stream goes on while its model is loaded, and how it ends if the load fails."""

    media_type: str = EVENT_TYPE
    keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE  # sent after some seconds of silence
    before_error: bytes = b"event: error\ndata: "  # stands before the body of an error
    after_error: bytes = b"\n\n"


EVENTS = WaitingStream()  # server-sent events


class RequestHold:
    """The leases of one HTTP request; sends signs of life to its client during a load."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._leases: list[Lease] = []
        self._began: WaitingStream | None = None  # what was sent before the endpoint's response
        self._response_is_stream = True  # the endpoint's response is a stream, not an error
        self._error = b""  # the body of a response that is not a stream: an error

    def llm_of(self, shelved: ShelvedModel) -> LLM | None:
        """Return a model if the request already holds it; else None."""
        return next((lease.llm for lease in self._leases if lease.shelved is shelved), None)

    def add(self, lease: Lease) -> None:
        """Keep a model loaded until the request ends."""
        self._leases.append(lease)

    def release(self) -> None:
        """Release all models."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    async def wait(
        self, work: Coroutine[Any, Any, Lease], stream: WaitingStream, keep_alive_s: float
    ) -> Lease:
        """Return the result of `work`; the client gets a sign of life meanwhile."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=keep_alive_s))[0]:
                await self._keep_alive(stream)
            return task.result()
        finally:
            task.cancel()

    async def _keep_alive(self, stream: WaitingStream) -> None:
        if self._began is None:
            self._began = stream
            headers = {**EVENT_HEADERS, "content-type": stream.media_type}
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        body = {"type": "http.response.body", "body": stream.keep_alive(), "more_body": True}
        await self._send(body)

    async def send(self, message: Message) -> None:
        """Send a part of the endpoint's response.

        If a stream has begun already, the response must continue it: its own start is left out, and
        an error becomes the stream's last event or line.
        """
        if self._began is None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._response_is_stream = kind.startswith(self._began.media_type)
        elif self._response_is_stream:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                last = self._began.before_error + self._error + self._began.after_error
                await self._send({**message, "body": last})


class HoldModels:
    """Middleware: gives every HTTP request a RequestHold, and releases it at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
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
