"""A program in a terminal: what a person types, and what the screen shows."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROWS, COLUMNS = 50, 120
# Sequences that move the cursor, set colours, or name the window.
CONTROL = re.compile(r"\x1b(\[[0-9;?<>=]*[a-zA-Z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78])")


class Terminal:
    """Runs a program in a pseudo-terminal until the block ends."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._shown = b""
        self._screen, program_end = pty.openpty()
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, size)
        self._program = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=program_end,
            stdout=program_end,
            stderr=program_end,
            start_new_session=True,
        )
        os.close(program_end)

    @property
    def text(self) -> str:
        """All that was shown, without blanks: programs move the cursor instead of writing them."""
        return re.sub(r"\s", "", CONTROL.sub("", self._shown.decode(errors="replace")))

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str, most_s: float = 90.0) -> None:
        """Wait until the screen has shown a text; blanks do not matter."""
        wanted, end = re.sub(r"\s", "", text), time.monotonic() + most_s
        while wanted not in self.text:
            assert time.monotonic() < end, f"{text!r} was not shown: {self.text[-2000:]}"
            if select.select([self._screen], [], [], 0.2)[0]:
                self._shown += os.read(self._screen, 1 << 16)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._program.terminate()
        try:
            self._program.wait(10)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        os.close(self._screen)
