"""Keys that are typed while something else is shown."""

import io
import os
import pty
import sys
import termios
from pathlib import Path

import pytest

from headroom.cli import quiet_keys as module
from headroom.cli.quiet_keys import marked_pastes, quiet_keys


def echoes(terminal: int) -> bool:
    """Return whether keys are shown and lines edited by the system; both or none."""
    flags = termios.tcgetattr(terminal)[3]
    assert bool(flags & termios.ECHO) is bool(flags & termios.ICANON)
    return bool(flags & termios.ECHO)


@pytest.mark.parametrize("foreground", [True, False])
def test_keys_are_not_shown_while_the_block_runs_unless_in_the_background(
    foreground: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, side = pty.openpty()
    group = os.getpgrp() if foreground else -1
    monkeypatch.setattr(module.os, "tcgetpgrp", lambda terminal: group)
    with open(main, "rb"), open(side) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert echoes(side)
        with quiet_keys():
            assert echoes(side) is not foreground
        assert echoes(side)
        with pytest.raises(KeyboardInterrupt), quiet_keys():
            raise KeyboardInterrupt
        assert echoes(side)


def test_what_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/null").open() as nothing:
        for stdin in (nothing, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            with quiet_keys():
                pass


def test_pastes_are_marked_until_the_block_ends_however_it_ends() -> None:
    terminal = io.StringIO()
    with marked_pastes(terminal):
        assert terminal.getvalue() == "\x1b[?2004h"
    assert terminal.getvalue() == "\x1b[?2004h\x1b[?2004l"
    with pytest.raises(KeyboardInterrupt), marked_pastes(terminal):
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[?2004h\x1b[?2004l")
