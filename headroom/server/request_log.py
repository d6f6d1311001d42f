"""Logs one line for each HTTP request, and keeps a record of the current one."""

import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headroom.server.keys import ApiKey
from headroom.server.metrics import Metrics
from headroom.server.refusals import CLIENT_CLOSED, short_path

log = logging.getLogger("headroom.server")

ID_HEADER = "x-request-id"
CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # ids of clients that are used as they are
# Logged at level debug, because monitors request these paths every few seconds.
QUIET_PATHS = ("/health", "/metrics")

_CURRENT: ContextVar["RequestRecord | None"] = ContextVar("request", default=None)


@dataclass(slots=True)
class RequestRecord:
    """What the log and the limits of a key need to know about one HTTP request."""

    id: str
    key: ApiKey | None = None  # the one that the client sent
    body_bytes: int = 0
    # Its prompts share prefixes with those of the same cache key; None: with no other prompt.
    cache_key: str | None = ""
    prompt_tokens: int = 0  # of every answer
    generated_tokens: int = 0
    first_token_at: float | None = None  # time.perf_counter()

    @property
    def prefix_key(self) -> str | None:
        """The cache key of its prompts: different API keys never share a prefix."""
        return None if self.cache_key is None else f"{self.owner}\0{self.cache_key}"

    @property
    def owner(self) -> str:
        """The name of its API key; "" if it needs none."""
        return "" if self.key is None else self.key.name

    def add_token(self) -> None:
        """Count a generated token."""
        self.generated_tokens += 1
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()


def current_record() -> RequestRecord:
    """Return the record of the current HTTP request; outside of one, a new record."""
    return _CURRENT.get() or RequestRecord(new_request_id())


def new_request_id() -> str:
    """Return an id for one HTTP request."""
    return f"req_{uuid.uuid4().hex}"


class WatchRequests:
    """Middleware: gives each request an id, logs it and measures it.

    Neither the request's body nor its key is logged.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and record its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(ID_HEADER, "")
        record = RequestRecord(wanted if CLIENT_ID.fullmatch(wanted) else new_request_id())
        status, complete, began = 500, False, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = record.id
            else:
                complete = not message.get("more_body", False)
            await send(message)

        token = _CURRENT.set(record)
        try:
            await self._app(scope, receive, watch)
        finally:
            _CURRENT.reset(token)
            seconds = time.perf_counter() - began
            status = status if complete or status >= 400 else CLIENT_CLOSED
            # Paths without a route share one label, so that clients cannot fill the registry.
            endpoint = getattr(scope.get("route"), "path", "unknown")
            self._metrics.request_ended(endpoint, status, seconds)
            if record.key is not None:
                record.key.spend_tokens(record.prompt_tokens + record.generated_tokens)
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            log.log(level, "request: %s", _line(scope, status, record, began, seconds))


def _line(scope: Scope, status: int, record: RequestRecord, began: float, seconds: float) -> str:
    # A path may contain any character: those that would end the line are escaped.
    path = short_path(scope["path"]).encode("unicode_escape").decode()
    parts = [f"{scope['method']} {path} {status}"]
    if record.prompt_tokens or record.generated_tokens:
        parts.append(f"{record.prompt_tokens} + {record.generated_tokens} tokens")
    if record.first_token_at is not None:
        parts.append(f"first after {record.first_token_at - began:.3f} s")
    parts.append(f"{seconds:.3f} s")
    if record.key is not None:
        parts.append(f"key {record.key.name}")
    return ", ".join([*parts, record.id])
