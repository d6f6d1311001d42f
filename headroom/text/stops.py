"""StopFinder: ends a stream of text at the first stop text, wherever the pieces are cut."""

from collections.abc import Sequence

from headroom.errors import RequestError


class StopFinder:
    """Passes text on until a stop text is complete; never shows a stop text or a part of one.

    The stop that is complete first wins; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("A stop text is empty.", param="stop")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""  # the end of the text so far that may be the start of a stop
        self.stopped = False

    def push(self, text: str) -> str:
        """Take the next piece of text and return what is safe to show."""
        if self.stopped:
            return ""
        text = self._held + text
        if (start := self._find(text)) is not None:
            self.stopped = True
            self._held = ""
            return text[:start]
        safe = len(text) - self._overlap(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return what was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Return where the stop begins that is complete first, if one is."""
        starts = ((text.find(stop), len(stop)) for stop in self._stops)
        found = [(start + length, start) for start, length in starts if start >= 0]
        return min(found)[1] if found else None

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of the text with which a stop begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
