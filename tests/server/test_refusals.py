"""Errors and what they are to a client."""

import logging

import pytest

from headroom.errors import CapacityError, HeadroomError, KernelError, ModelError, RequestError
from headroom.server.refusals import RefusalError, problem_of


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


def test_who_is_refused_for_want_of_room_is_told_when_to_come_back() -> None:
    assert problem_of(CapacityError("Full.")).headers == {"Retry-After": "1"}


def test_what_nobody_foresaw_is_logged_but_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headroom"), "propagate", True)
    problem = problem_of(ValueError("a secret path"))
    assert problem.status == 500
    assert problem.message == "The server failed on its own."
    assert "a secret path" in caplog.text
