"""Log lines have one format, and go to what standard error is when they are written."""

import io
import logging
import re
import sys

import pytest

from headroom.log import start_logging

log = logging.getLogger("headroom.plan.plan")


def test_a_line_has_time_level_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("info")
    log.warning("plan: %d bytes are missing", 5)
    log.info("plan: made")
    log.debug("plan: not shown")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d W plan: 5 bytes are missing", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d I plan: made", second)


def test_starting_again_writes_each_line_once_by_the_new_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_logging("debug")
    start_logging("error")
    log.warning("not shown")
    log.error("shown")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["shown"]


def test_lines_follow_standard_error_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    start_logging("info")
    stand_in = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stand_in)
    log.info("drawn above a bar")
    assert stand_in.getvalue().endswith("I drawn above a bar\n")


def test_other_packages_lines_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging("debug")
    logging.getLogger("other").info("theirs")
    assert capsys.readouterr().err == ""
