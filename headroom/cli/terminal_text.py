"""TerminalText: writes text to a terminal as it comes, with its words wrapped."""

import re
import shutil
from collections.abc import Callable
from typing import IO

from rich.cells import get_character_cell_size

LEAST_WIDTH = 20  # columns; a narrower terminal wraps by itself
TAB = 8  # columns between a terminal's tab stops
# Control characters but line feed and tab: a model's text must not steer the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r"\s*(?P<mark>`{3,}|~{3,})(?P<info>.*)")
# Indentation, and the mark of an item of a list.
_LEAD = re.compile(r"[ \t]*(?:[-*+•] +|\d{1,3}[.)] +)?")


def terminal_width() -> int:
    """Return the columns of the terminal, which its user may change at any time."""
    return max(LEAST_WIDTH, shutil.get_terminal_size().columns)


class TerminalText:
    """Wraps words at spaces, and keeps lines of code blocks whole, so that they copy cleanly.

    A word is written once its end is known. Lines that continue an item of a list are indented
    like the item's text.
    """

    def __init__(self, file: IO[str], width: Callable[[], int] = terminal_width) -> None:
        self._file = file
        self._width = width
        self._column = 0  # of the cursor
        self._line = ""  # what the line has before `_gap`, unwrapped
        self._gap = ""  # spaces that are written only if a word follows in the same line
        self._word = ""
        self._fence = ""  # the mark that opened a code block; "" outside

    @property
    def at_line_start(self) -> bool:
        """Whether the cursor is at the start of a line, and no word is held back."""
        return not self._column and not self._word

    def write(self, text: str) -> None:
        """Write what is complete of the text so far."""
        for char in _CONTROLS.sub("", text):
            if char == "\n":
                self._end_line()
            elif self._fence:
                self._put(char)
            elif char in " \t":
                self._end_word()
                self._gap += char
            else:
                if self._word and self._breaks_before(char):
                    self._end_word()
                self._word += char

    def finish(self) -> None:
        """Write the word that was held back."""
        self._end_word()
        self._gap = ""

    def _breaks_before(self, char: str) -> bool:
        """Whether a line may end between the word and a character: Chinese needs no spaces."""
        size = get_character_cell_size(char)
        return size == 2 or (size == 1 and get_character_cell_size(self._word[0]) == 2)

    def _put(self, text: str) -> None:
        self._file.write(text)
        self._line += text
        self._column = _column_after(self._column, text)

    def _end_word(self) -> None:
        if not self._word:
            return
        before = self._line + self._gap
        lead = _LEAD.match(before)
        assert lead is not None  # the pattern also matches an empty text
        end = _column_after(_column_after(self._column, self._gap), self._word)
        if lead.end() < len(before) and end > (width := self._width()):
            indent = min(lead.end(), width // 2)
            self._file.write("\n" + " " * indent)
            self._column, self._line = indent, before
        else:
            self._put(self._gap)
        self._put(self._word)
        self._gap = self._word = ""

    def _end_line(self) -> None:
        self.finish()
        self._file.write("\n")
        found = _FENCE.fullmatch(self._line)
        if self._fence:  # a mark that is at least as long and alone on its line ends the block
            if found and found["mark"].startswith(self._fence) and not found["info"].strip():
                self._fence = ""
        elif found and ("`" not in found["info"] or found["mark"][0] == "~"):
            self._fence = found["mark"]
        self._line, self._column = "", 0


def _column_after(column: int, text: str) -> int:
    for char in text:
        if char == "\t":
            column += TAB - column % TAB
        else:
            column += get_character_cell_size(char)
    return column
