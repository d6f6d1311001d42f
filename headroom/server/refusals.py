"""Refusals: turns an error into an HTTP status and OpenAI's error object."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException

from headroom.errors import (
    CapacityError,
    ContextLengthError,
    HeadroomError,
    ModelError,
    RequestError,
)
from headroom.server.json_values import JSONResponse

log = logging.getLogger("headroom.server")

INVALID = "invalid_request_error"
SERVER = "server_error"
RATE_LIMIT = "rate_limit_error"
RETRY_AFTER_S = 1  # sent to clients that come while the server is full or stopping
MOST_PATH = 200  # characters of an unknown path that an error repeats
MOST_MESSAGE = 2000  # characters of an error, which may quote what the client sent
CLIENT_CLOSED = 499  # nginx's status for a client that left; nobody gets it, metrics count it


class RefusalError(HeadroomError):
    """An error that knows its HTTP status and its error code."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.status = status
        self.code = code
        self.retry_after_s = RETRY_AFTER_S if status == 503 else retry_after_s


def shutting_down() -> RefusalError:
    """Return the refusal of a request that comes, or has not ended, when the server stops."""
    return RefusalError(503, "shutting_down", "The server is shutting down.")


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as an HTTP client gets it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error object."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))


def problem_of(error: BaseException) -> Problem:
    """Return what a client gets for an error; an unexpected error is logged and becomes a 500.

    A long message keeps its beginning and its end, where the hint is.
    """
    problem = _whole_problem_of(error)
    message, param = without_middle(problem.message, MOST_MESSAGE), problem.param
    return replace(
        problem, message=message, param=param and without_middle(param, MOST_MESSAGE // 10)
    )


def without_middle(text: str, most: int) -> str:
    """Return a text; if it is too long, its middle is left out, and it has `most` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def _whole_problem_of(error: BaseException) -> Problem:
    if isinstance(error, RefusalError):
        return _from_refusal(error)
    if isinstance(error, ContextLengthError):
        return Problem(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return Problem(400, str(error), param=error.param, code="invalid_value")
    if isinstance(error, ModelError):
        return Problem(400, str(error), param=error.param, code="unsupported_by_model")
    if isinstance(error, CapacityError):
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        return Problem(503, str(error), SERVER, code="capacity_exceeded", headers=retry)
    if isinstance(error, HTTPException):
        return _from_http(error)
    log.error("server: a request failed unexpectedly", exc_info=error)
    message = (
        str(error)
        if isinstance(error, HeadroomError)
        else "The server failed; its log has the details."
    )
    return Problem(500, message, SERVER, code="internal_error")


def problem_for(request: Request, error: Exception) -> Problem:
    """Return what a client gets for an error of its request; 404 and 405 name method and path."""
    problem = problem_of(error)
    if isinstance(error, HTTPException) and problem.status in (404, 405):
        where = f"{request.method} {short_path(request.url.path)}"
        text = "does not exist" if problem.status == 404 else "is not allowed"
        meant = _meant_path(request) if problem.status == 404 else None
        hint = "" if meant is None else f" Did you mean {meant}?"
        problem = Problem(
            problem.status, f"{where} {text}.{hint}", code=problem.code, headers=problem.headers
        )
    return problem


def _meant_path(request: Request) -> str | None:
    """Return the endpoint that a client meant whose base URL is wrong: without /v1, for example."""
    path = request.url.path.rstrip("/")
    for method, known in request.app.state.endpoints:
        if method == request.method and (path.endswith(known) or known == f"/v1{path}"):
            return str(known)
    return None


def _from_refusal(error: RefusalError) -> Problem:
    kind = SERVER if error.status >= 500 else INVALID
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 429:
        kind = RATE_LIMIT
    return Problem(error.status, str(error), kind, error.param, error.code, headers)


def _from_http(error: HTTPException) -> Problem:
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    phrase = HTTPStatus(error.status_code).phrase
    kind = SERVER if error.status_code >= 500 else INVALID
    return Problem(
        error.status_code, error.detail or phrase, kind, code=code, headers=error.headers or {}
    )


def short_path(path: str) -> str:
    """Return a path as an error or a log line repeats it."""
    return path if len(path) <= MOST_PATH else f"{path[:MOST_PATH]}..."
