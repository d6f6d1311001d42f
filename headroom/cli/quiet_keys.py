"""quiet_keys(): keeps typed keys from being shown in the midst of an answer or a progress bar."""

import contextlib
import os
import sys
import termios
from collections.abc import Iterator


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
    quiet[3] &= ~termios.ECHO  # the local flags
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
