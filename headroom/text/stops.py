"""StopFinder: ends a stream of text at its first stop text, which may span several tokens."""

from collections.abc import Sequence

from headroom.errors import RequestError


class StopFinder:
    """Passes text on until a stop text is complete; never returns a part of a stop text.

    The stop text that is complete first counts, and of several that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("A stop text is empty.", hint="Leave it out.", param="stop")
        self._stops = tuple(stops)
        self._held = ""  # the end of the text, held back because it may begin a stop text
        self.found: str | None = None  # the stop text that ended the text
        self.withheld = 0  # characters that were pushed and not returned: held back or cut off

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the text."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Take the next part of the text and return what is safe to show."""
        shown = "" if self.stopped else self._show(text)
        self.withheld += len(text) - len(shown)
        return shown

    def _show(self, text: str) -> str:
        text = self._held + text
        self.found = self._find(text)
        if self.found is not None:
            self._held = ""
            return text[: text.find(self.found)]
        safe = len(text) - overlap(text, self._stops)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the text that was held back; no more text comes."""
        held, self._held = self._held, ""
        self.withheld -= len(held)
        return held

    def _find(self, text: str) -> str | None:
        """Return the stop text that is complete first in the text; None if none is."""
        found = [stop for stop in self._stops if stop in text]
        return min(found, key=lambda stop: (text.find(stop) + len(stop), -len(stop)), default=None)


def overlap(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is the beginning of a mark."""
    longest = max(map(len, marks), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
