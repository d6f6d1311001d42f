"""Keys that are typed in the midst of an answer or a progress bar: not shown, and read later."""

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from typing import IO

MARK_PASTES, MARK_NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste on and off


@contextlib.contextmanager
def quiet_keys() -> Iterator[None]:
    """Let the terminal show no keys until the block ends; they are read afterwards.

    Ctrl-C still interrupts. A process in the background leaves the terminal as it is: changing it
    would stop the process.
    """
    try:
        terminal = sys.stdin.fileno()
        foreground = os.isatty(terminal) and os.tcgetpgrp(terminal) == os.getpgrp()
        before = termios.tcgetattr(terminal) if foreground else None
    except (OSError, ValueError, AttributeError, termios.error):  # no file, or another's terminal
        before = None
    if before is None:
        yield
        return
    quiet = termios.tcgetattr(terminal)
    # Of the local flags. Without ICANON a long line is kept whole: the system's own editing of
    # lines keeps 4095 bytes and drops the others.
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextlib.contextmanager
def marked_pastes(terminal: IO[str]) -> Iterator[None]:
    """Let the terminal mark where a paste begins and ends, until the block ends.

    A prompt does so itself. Between prompts, as during an answer, the lines of a paste would else
    look like lines that were typed.
    """
    terminal.write(MARK_PASTES)
    terminal.flush()
    try:
        yield
    finally:
        terminal.write(MARK_NO_PASTES)
        terminal.flush()
