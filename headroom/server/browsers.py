"""Protection against web pages of other sites in a user's browser.

Such a page can send requests to a server on the user's machine. The server refuses what only such
pages send: foreign origins, host names that a foreign site has pointed at this machine (DNS
rebinding), and bodies that browsers send without a preflight request.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headroom.options import Options
from headroom.server.refusals import RefusalError

WILDCARD = "*"
# All origins of a scheme, for programs whose origins have random names: vscode-webview://*
ANY_OF_SCHEME = "://*"
# Names of the machine that a container runs on, as seen from the container.
CONTAINER_HOSTS = ("host.docker.internal", "host.containers.internal")
OLLAMA_PATHS = "/api/"

AnswerError = Callable[[Request, Exception], Awaitable[Response]]


def listed(setting: str | None) -> list[str]:
    """Return the values of a setting that may be repeated."""
    return [text.strip() for text in (setting or "").split(",") if text.strip()]


def allowed_origins(setting: str | None) -> re.Pattern[str] | None:
    """Return a pattern of the origins that a setting such as --cors names; None if it names none.

    Browsers send origins in lower case.
    """
    origins = [origin.lower().rstrip("/") for origin in listed(setting)]
    if not origins:
        return None
    patterns = (
        ".*"
        if origin == WILDCARD
        else re.escape(origin.removesuffix(WILDCARD)) + ".+"
        if origin.endswith(ANY_OF_SCHEME)
        else re.escape(origin)
        for origin in origins
    )
    return re.compile("|".join(patterns))


class GuardAgainstPages:
    """Middleware: refuses requests of other sites' pages."""

    def __init__(self, app: ASGIApp, options: Options, answer_error: AnswerError) -> None:
        self._app = app
        self._answer_error = answer_error
        self._origins = allowed_origins(options.cors)
        names = ("localhost", options.host, socket.gethostname(), *CONTAINER_HOSTS)
        self._hosts = {name.lower() for name in (*names, *listed(options.allow_host))}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_host(headers.get("host", ""))
                self._check_origin(headers)
                if scope["method"] == "POST":
                    _check_type(headers, scope["path"])
            except RefusalError as error:
                response = await self._answer_error(Request(scope, receive), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        name = host_name(host)
        if (
            not host
            or WILDCARD in self._hosts
            or name in self._hosts
            or name.endswith(".localhost")
        ):
            return
        if not _is_address(name):  # a foreign site cannot choose what an address means
            raise RefusalError(
                403,
                "host_not_allowed",
                f"The server does not answer to the host {name[:100]!r}.",
                hint=f"Start it with --allow-host {name[:100]}, or use its address.",
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin", "").lower()
        if not origin or (self._origins is not None and self._origins.fullmatch(origin)):
            return
        if _place_of(origin) != headers.get("host", "").lower():
            raise RefusalError(
                403,
                "origin_not_allowed",
                f"Pages of {origin[:100]} may not use this server.",
                hint=f"Start it with --cors {origin[:100]} to allow them.",
            )


def host_name(host: str) -> str:
    """Return a Host header without its port, and an IPv6 address without its brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return host.lower()


def _place_of(origin: str) -> str | None:
    """Return the host and port of an origin; None if its text is not an origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # a bracket without its partner
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _check_type(headers: Headers, path: str) -> None:
    """Refuse a body that is not declared as JSON; pages may send others without a preflight."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    # Ollama accepts any type, and its users call it with `curl -d`. A browser sends the origin.
    if path.startswith(OLLAMA_PATHS) and "origin" not in headers:
        return
    raise RefusalError(
        415,
        "unsupported_media_type",
        f"The body has the content type {kind[:100] or 'nothing'!r}, not JSON.",
        hint="Send it with the header Content-Type: application/json.",
    )
