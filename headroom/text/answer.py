"""AnswerText: turns the tokens of one answer into thought, text and tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from headroom.text.answer_parser import AnswerParser, AnswerParts, WrittenAnswer
from headroom.text.detokenizer import Detokenizer
from headroom.text.stops import StopFinder
from headroom.text.tokenizer import Tokenizer


class AnswerText:
    """Turns the tokens of one answer into what a user sees, up to the first stop text.

    Stop texts are looked for in the text only, not in the thought or in tool calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        parser: AnswerParser | None = None,  # None: the answer is plain text
        *,
        continues: bool = False,  # the answer continues the prompt's text
    ) -> None:
        self._parser = parser or AnswerParser()
        self._detokenizer = Detokenizer(tokenizer, marks=self._parser.marks, continues=continues)
        self._stops = StopFinder(stops)
        self.decoded = 0  # characters of all tokens so far, shown or not
        self.thought_tokens = 0  # tokens of the thought so far, with the marks around it
        # For the parser's `keep`, which is called with the whole answer; unused without one.
        self._tokens: list[int] = []
        self._raw: list[str] = []
        self._after_thought = 0  # characters up to the end of the thought
        self._parts: list[AnswerParts] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the answer."""
        return self._stops.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop text that has ended the answer; None if none has."""
        return self._stops.found

    @property
    def shown(self) -> int:
        """The number of characters that were returned or were markup, up to a stop text."""
        return self.decoded - self._parser.held - self._stops.withheld

    def is_text(self, start: int, end: int) -> bool:
        """Return whether some of the characters from `start` to `end` are shown as text."""
        return self._parser.is_text(start, end)

    def push(self, token_id: int) -> AnswerParts:
        """Take one token and return what may be shown now."""
        was_thinking = self._parser.in_thought
        parts = self._show(self._detokenizer.push(token_id))
        self.thought_tokens += was_thinking or self._parser.in_thought
        if self._parser.keep is not None:
            self._tokens.append(token_id)
            if was_thinking:
                self._after_thought = self.decoded
        return parts

    def finish(self) -> AnswerParts:
        """Return what was held back; no more tokens come."""
        last = self._show(self._detokenizer.finish())
        rest = self._cut(self._parser.finish())
        parts = last + replace(rest, text=rest.text + self._stops.finish())
        if self._parser.keep is not None:
            self._keep(self._parser.keep, rest)
        return parts

    def _keep(self, keep: Callable[[WrittenAnswer], None], last: AnswerParts) -> None:
        parts = AnswerParts(
            thought="".join(part.thought for part in self._parts) + last.thought,
            text="".join(part.text for part in self._parts) + last.text,
            calls=tuple(call for part in self._parts for call in part.calls) + last.calls,
        )
        keep(
            WrittenAnswer(
                tokens=self._tokens,
                raw="".join(self._raw),
                after_thought=self._after_thought,
                parts=parts,
            )
        )

    def _show(self, text: str) -> AnswerParts:
        self.decoded += len(text)
        parts = self._cut(self._parser.push(text))
        if self._parser.keep is not None:
            self._raw.append(text)
            self._parts.append(parts)
        return parts

    def _cut(self, parts: AnswerParts) -> AnswerParts:
        """Return parts up to a stop text; the calls of parts come after their text."""
        text = self._stops.push(parts.text)
        if self.stopped:
            return replace(parts, text=text, calls=())
        if parts.calls:  # a stop text cannot begin before a call and end after it
            text += self._stops.finish()
        return replace(parts, text=text)
