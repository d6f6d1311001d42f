"""Refusals: how an error is reported to an HTTP client: its status and its OpenAI error object."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from headroom.errors import (
    CapacityError,
    ContextLengthError,
    HeadroomError,
    ModelError,
    RequestError,
)

log = logging.getLogger("headroom.server")

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_AFTER_S = 1
CLIENT_CLOSED = 499  # nginx's status for a client that left before its answer; only for metrics


class RefusalError(HeadroomError):
    """An error with the HTTP status and the code that a client gets."""

    def __init__(
        self, status: int, code: str, message: str, *, hint: str = "", param: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Problem:
    """One error as an HTTP client gets it."""

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
        """Return the whole HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))


def problem_of(error: BaseException) -> Problem:
    """Return the status and shape of an error; an unexpected error is logged and becomes a 500."""
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
    message = str(error) if isinstance(error, HeadroomError) else "The server failed on its own."
    return Problem(500, message, SERVER, code="internal_error")


def problem_for(request: Request, error: Exception) -> Problem:
    """Return the status and shape of an error that a request raised."""
    problem = problem_of(error)
    if isinstance(error, HTTPException) and problem.status in (404, 405):
        where = f"{request.method} {request.url.path}"
        text = "does not exist" if problem.status == 404 else "is not allowed"
        problem = Problem(
            problem.status, f"{where} {text}.", code=problem.code, headers=problem.headers
        )
    return problem


def refuse_invalid(error: ValidationError) -> RefusalError:
    """Return a refusal for the first of pydantic's errors, with the field at fault."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _dotted(first["loc"])
    kind, text = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "missing":
        code, text = "missing_required_parameter", "this field is required"
    elif kind == "model_type":
        code, text = "invalid_type", "input should be an object"
    else:
        code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    where = param or "The body"
    return RefusalError(400, code, f"{where}: {text[:1].lower()}{text[1:]}.", param=param)


def _from_refusal(error: RefusalError) -> Problem:
    kind = SERVER if error.status >= 500 else INVALID
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Problem(error.status, str(error), kind, error.param, error.code, headers)


def _from_http(error: HTTPException) -> Problem:
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    phrase = HTTPStatus(error.status_code).phrase
    kind = SERVER if error.status_code >= 500 else INVALID
    return Problem(
        error.status_code, error.detail or phrase, kind, code=code, headers=error.headers or {}
    )


def _dotted(path: tuple[int | str, ...]) -> str | None:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or None
