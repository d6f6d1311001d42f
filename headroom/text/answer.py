"""AnswerText: the text of one answer, made from its tokens and cut at the first stop text."""

from collections.abc import Sequence

from headroom.text.detokenizer import Detokenizer
from headroom.text.stops import StopFinder
from headroom.text.tokenizer import Tokenizer


class AnswerText:
    """Turns the tokens of one answer into the text that a user sees."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, show_control: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, show_control=show_control)
        self._stops = StopFinder(stops)
        self.decoded = 0  # characters that the tokens so far stand for, shown or not
        self.shown = 0  # characters that `push` and `finish` have returned

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the answer."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Take one token and return the text that may be shown now."""
        return self._show(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the text that was held back; no more tokens come."""
        shown = self._show(self._detokenizer.finish())
        held = self._stops.finish()
        self.shown += len(held)
        return shown + held

    def _show(self, text: str) -> str:
        self.decoded += len(text)
        shown = self._stops.push(text)
        self.shown += len(shown)
        return shown
