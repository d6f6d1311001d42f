"""Errors in Anthropic's format, for the paths and clients of its API."""

from typing import Any

from fastapi import Request

from headroom.errors import CapacityError, ContextLengthError
from headroom.server.json_values import JSONResponse
from headroom.server.refusals import Problem
from headroom.server.request_log import current_record

# After an error with this code, clients send the whole conversation again, without a thread.
NO_THREADS = "thread_unsupported_request"
OVERLOADED = 529  # Anthropic's status for a server that is full
# Error types by HTTP status. Any other status below 500 is an invalid_request_error, above 500 an
# api_error.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    OVERLOADED: "overloaded_error",
}


def speaks_anthropic(request: Request) -> bool:
    """Whether a request expects Anthropic's format, by its path or its headers."""
    path = request.url.path
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    about_models = path == "/v1/models" or path.startswith("/v1/models/")
    return about_models and "anthropic-version" in request.headers


def error_status(problem: Problem, error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return OVERLOADED if isinstance(error, CapacityError) else problem.status


def error_body(problem: Problem, error: BaseException, request_id: str) -> dict[str, Any]:
    """Return the JSON object of an error."""
    status = error_status(problem, error)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    described: dict[str, Any] = {"type": kind, "message": _message(problem, error)}
    if problem.code == NO_THREADS:
        described["details"] = {"error_code": NO_THREADS, "unsupported": []}
    return {"type": "error", "error": described, "request_id": request_id}


def error_response(problem: Problem, error: BaseException) -> JSONResponse:
    """Return the HTTP response to a request that failed."""
    request_id = current_record().id
    return JSONResponse(
        error_body(problem, error, request_id),
        status_code=error_status(problem, error),
        headers={**problem.headers, "request-id": request_id},
    )


def _message(problem: Problem, error: BaseException) -> str:
    if isinstance(error, ContextLengthError):
        # Agents look for these words and numbers to know that they must shorten their history.
        return f"prompt is too long: {error.tokens} tokens > {error.context} maximum. {error.hint}"
    return problem.message
