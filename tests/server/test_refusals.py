"""Errors become HTTP statuses and error objects."""

import logging

import pytest

from headroom.errors import CapacityError, HeadroomError, KernelError, ModelError, RequestError
from headroom.server.refusals import MOST_MESSAGE, RefusalError, problem_of


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("Wrong.", param="n"), 400, "invalid_request_error"),
        (ModelError("No template."), 400, "invalid_request_error"),
        (CapacityError("Full."), 503, "server_error"),
        (RefusalError(404, "model_not_found", "No."), 404, "invalid_request_error"),
        (RefusalError(500, "generation_failed", "No."), 500, "server_error"),
        (KernelError("No kernel."), 500, "server_error"),
    ],
)
def test_every_error_has_its_status_and_type(error: HeadroomError, status: int, kind: str) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.type, problem.message) == (status, kind, error.message)
    assert problem.body()["error"]["param"] == error.param


def test_a_refusal_for_lack_of_capacity_says_when_to_retry() -> None:
    assert problem_of(CapacityError("Full.")).headers == {"Retry-After": "1"}
    assert problem_of(RefusalError(503, "shutting_down", "Later.")).headers == {"Retry-After": "1"}
    assert problem_of(RefusalError(500, "failed", "Never.")).headers == {}


def test_an_unexpected_error_is_logged_but_not_shown_to_the_client(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headroom"), "propagate", True)
    problem = problem_of(ValueError("a secret path"))
    assert problem.status == 500
    assert problem.message == "The server failed; its log has the details."
    assert "a secret path" in caplog.text


def test_an_error_that_quotes_much_keeps_its_beginning_and_its_hint() -> None:
    error = RequestError(f"Invalid: {'a' * 70_000}.", hint="Try less.", param="tools." + "b" * 5000)
    problem = problem_of(error)
    assert len(problem.message) == MOST_MESSAGE
    assert problem.message.startswith("Invalid: aaa")
    assert problem.message.endswith("aaa. Try less.")
    assert problem.param is not None
    assert (problem.param[:8], len(problem.param)) == ("tools.bb", 200)
