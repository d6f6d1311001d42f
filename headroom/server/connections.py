"""Connections: limits on their number, and on how long a client may take to send and to read."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger("headroom.server")

# Common clients drop idle connections after 5 to 60 seconds. The server waits longer, so that it
# does not close a connection just when a client uses it again.
KEEP_ALIVE_S = 75
HEAD_S = 30.0  # seconds that a client has for a request's first line and headers
READ_S = 60.0  # seconds after which a client that does not read its answer is disconnected
CLOSE_S = 10.0  # seconds that a client has to read the last bytes before the connection ends
HANDSHAKE_S = 10.0  # seconds that a client has for the TLS handshake
HANDSHAKES = 16  # TLS handshakes that may be under way even if there are `limit` connections
ACCEPT_AGAIN_S = 1.0  # seconds after an error until the next connection is accepted
HEALTH_CONNECTIONS = 16  # connections above the limit, which may only ask for /health
SPARE_FILES = 32  # file descriptors kept free for model files, other sockets and logs
FEWEST_CONNECTIONS = 8
REPORT_EVERY_S = 60.0  # between two log lines about connections that cannot be accepted
HEALTH_PATH = "/health"
ACCEPT_ERROR = "socket.accept()"  # how asyncio's messages of such errors begin


class HttpParser(h11.Connection):
    """An HTTP parser that refuses long heads, however they arrive.

    h11 itself counts the bytes of incomplete heads only.
    """

    def __init__(self, most_head_bytes: int) -> None:
        super().__init__(h11.SERVER, most_head_bytes)
        self._most_head_bytes = most_head_bytes

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next part of what the client sent."""
        event = super().next_event()
        if isinstance(event, h11.Request) and _head_bytes(event) > self._most_head_bytes:
            raise h11.RemoteProtocolError("The head is too long.", error_status_hint=431)
        return event


def _head_bytes(request: h11.Request) -> int:
    """Return the bytes of a request's first line and headers, without needless blanks."""
    line = len(request.method) + len(request.target) + len("  HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in request.headers)


class HttpConnection(H11Protocol):
    """One client's connection, parsed by h11, because httptools does not limit headers."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limit: int,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = log  # uvicorn's own has no time and no level in its lines
        if config.h11_max_incomplete_event_size is not None:
            self.conn = HttpParser(config.h11_max_incomplete_event_size)
        self._limit = limit
        self._head_since: float | None = None  # when the server began to wait for a request's head
        self._unread_since: float | None = None  # when the client's receive buffer became full
        self._closing_since: float | None = None
        self._idle_since = 0.0

    @property
    def answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        self._head_since = self._idle_since = time.monotonic()
        if len(self.connections) <= self._limit or self._close_an_idle_one():
            return
        if len(self.connections) > self._limit + HEALTH_CONNECTIONS:
            transport.abort()
        else:
            self.app = HealthAlone(self.app, self._limit)

    def _close_an_idle_one(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        others = [other for other in self.connections if isinstance(other, HttpConnection)]
        idle = [other for other in others if other is not self and not other.answering]
        idle = [other for other in idle if not other.transport.is_closing()]
        if idle:
            oldest = min(idle, key=lambda other: other._idle_since).transport
            if oldest.get_extra_info("sslcontext") is None:
                oldest.close()
            else:
                oldest.abort()  # a TLS connection would stay open until the client closes it, too
        return bool(idle)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        if self.answering:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = time.monotonic()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Record that the client does not read."""
        self._unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client reads again."""
        self._unread_since = None
        super().resume_writing()

    def end_if_late(self, now: float) -> None:
        """Close the connection if its client takes too long to send or to read."""
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since >= CLOSE_S:
                self.transport.abort()  # a close would wait until the client reads
        elif self._unread_since is not None and now - self._unread_since >= READ_S:
            log.info("connections: disconnected a client that has read nothing for %.0f s", READ_S)
            self.transport.abort()
        elif self._head_since is not None and now - self._head_since >= HEAD_S:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with an error object."""
        body = connection_error("invalid_http", f"{msg.rstrip('.')}.", "invalid_request_error")
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


@dataclass(frozen=True, slots=True)
class HealthAlone:
    """The application for connections above the limit: they may only ask for /health."""

    app: ASGIApp
    limit: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and close the connection."""
        if scope["type"] == "http" and scope["path"] == HEALTH_PATH:
            await self.app(scope, receive, send)
            return
        text = f"The server has {self.limit} open connections, which is its limit. Try again later."
        body = connection_error("too_many_connections", text, "server_error")
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "retry-after": "1",
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 503, "headers": raw})
        await send({"type": "http.response.body", "body": body})


class TlsListener:
    """Accepts TLS connections, and bounds the number of handshakes that are under way.

    A connection counts as one only after its handshake. asyncio's own server would keep any number
    of silent clients for a minute each. It stands among the servers of uvicorn, which closes it.
    """

    def __init__(
        self,
        bound: socket.socket,
        context: ssl.SSLContext,
        new_connection: Callable[[], asyncio.Protocol],
        connections: Collection[object],  # whose handshakes have ended
        limit: int,  # of connections
    ) -> None:
        self._bound = bound
        self._context = context
        self._new_connection = new_connection
        self._connections = connections
        self._limit = limit
        self._handshakes: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop listening, and end the handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is listened to any more."""
        await asyncio.wait({self._accepting, *self._handshakes})

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        self._bound.setblocking(False)
        with self._bound:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(self._bound)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    message = f"{ACCEPT_ERROR} out of system resource"
                    loop.call_exception_handler({"message": message, "exception": error})
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                self._begin(accepted)
                await asyncio.sleep(0)  # others get their turn, even if many connections wait

    def _begin(self, accepted: socket.socket) -> None:
        """Begin a handshake; if there are too many, the oldest one is ended."""
        if len(self._handshakes) >= max(HANDSHAKES, self._limit - len(self._connections)):
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._handshake(accepted))
        self._handshakes[task] = None
        task.add_done_callback(lambda ended: self._handshakes.pop(ended, None))

    async def _handshake(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # of clients that leave, are silent or speak no TLS
            await loop.connect_accepted_socket(
                self._new_connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=CLOSE_S,
            )


def connection_error(code: str, message: str, kind: str) -> bytes:
    """Return an OpenAI error object as JSON."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def end_late(connections: Iterable[object], now: float) -> None:
    """Close all connections whose clients take too long to send or to read."""
    for connection in list(connections):
        if isinstance(connection, HttpConnection):
            connection.end_if_late(now)


def connection_limit(wanted: int) -> int:
    """Return how many connections the server accepts: the option, or less if files are limited."""
    files = descriptor_limit()
    if files is None:
        return wanted
    kept = SPARE_FILES + HEALTH_CONNECTIONS + HANDSHAKES
    left = files - len(os.listdir("/proc/self/fd")) - kept
    limit = min(wanted, max(FEWEST_CONNECTIONS, left))
    if limit < wanted:
        log.warning(
            "connections: at most %d of %d, because this process may open %d files",
            limit,
            wanted,
            files,
        )
    return limit


def descriptor_limit() -> int | None:
    """Raise the process's limit of open files as far as allowed; return it, or None if unknown."""
    try:
        import resource  # not on Windows
    except ModuleNotFoundError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY or not os.path.isdir("/proc/self/fd"):
        return None
    return hard


class AcceptErrors:
    """Handles errors of the event loop; logs connections that cannot be accepted once a minute.

    asyncio reports such an error for every attempt, thousands of times a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_at: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop."""
        if not str(context.get("message", "")).startswith(ACCEPT_ERROR):
            loop.default_exception_handler(context)
            return
        now = self._clock()
        if self._reported_at is None or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            log.error(
                "connections: cannot accept another one: %s; reported once a minute",
                context.get("exception"),
            )
