"""Server-sent events: a stream with keep-alive comments, which ends when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headroom.server.json_values import write_json
from headroom.server.refusals import CLIENT_CLOSED, RefusalError

Returned = TypeVar("Returned")
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
EVENT_TYPE = "text/event-stream"
# Ask proxies neither to buffer nor to cache events.
EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: object, name: str = "") -> bytes:
    """Return one event with a JSON value, and with a name if the API names its events."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {write_json(data)}\n\n".encode()


class EventStream(Response):
    """Sends events as they come, and calls `close` at the end, whatever ends the stream."""

    media_type = EVENT_TYPE

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        close: Callable[[], None],
        # What is sent after `keep_alive_s` seconds without an event.
        keep_alive: Callable[[], bytes] = lambda: KEEP_ALIVE,
    ) -> None:
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream, unless the client leaves."""
        gone = asyncio.create_task(_until_gone(receive))
        sender = asyncio.create_task(self._send_all(send))
        try:
            await asyncio.wait({gone, sender}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                await sender
        finally:
            await _end(gone, sender)
            await self._events.aclose()
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        upcoming = asyncio.create_task(self._next())
        try:
            while True:
                done, _ = await asyncio.wait({upcoming}, timeout=self._keep_alive_s)
                data = upcoming.result() if done else self._keep_alive()
                if data is None:
                    break
                if done:
                    upcoming = asyncio.create_task(self._next())
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            await _end(upcoming)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        return await anext(self._events, None)


async def while_connected(request: Request, work: Coroutine[Any, Any, Returned]) -> Returned:
    """Return the result of `work`; cancel it if the client leaves."""
    gone = asyncio.create_task(_until_gone(request.receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RefusalError(
                CLIENT_CLOSED, "client_closed", "The client left before the answer was complete."
            )
        return await task
    finally:
        await _end(gone, task)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
