"""AnswerText: the text of one answer, made from its tokens and cut at the first stop text."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from headroom.text.answer_parser import AnswerParser, AnswerParts, WrittenAnswer
from headroom.text.detokenizer import Detokenizer
from headroom.text.stops import StopFinder
from headroom.text.tokenizer import Tokenizer


class AnswerText:
    """Turns the tokens of one answer into the thoughts, text and tool calls that a user sees.

    Stop texts are looked for in the text only, not in thoughts and tool calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        parser: AnswerParser | None = None,  # None: the answer is plain text
        *,
        continues: bool = False,  # the answer goes on after the prompt's text
    ) -> None:
        self._parser = parser or AnswerParser()
        # Control tokens that the parser reads are not hidden from it.
        self._detokenizer = Detokenizer(tokenizer, marks=self._parser.marks, continues=continues)
        self._stops = StopFinder(stops)
        self.decoded = 0  # characters that the tokens so far stand for, shown or not
        self.thought_tokens = 0  # tokens of thoughts so far, with the marks around them
        # What the parser's `keep` is told at the end, if it is there.
        self._tokens: list[int] = []
        self._raw: list[str] = []
        self._rest = 0  # characters up to the end of the thought
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
        """Characters that were given out or that were marks; up to the stop text, if one came."""
        return self.decoded - self._parser.held - self._stops.withheld

    def push(self, token_id: int) -> AnswerParts:
        """Take one token and return what may be shown now."""
        was_thinking = self._parser.in_thought
        parts = self._show(self._detokenizer.push(token_id))
        self.thought_tokens += was_thinking or self._parser.in_thought
        if self._parser.keep is not None:
            self._tokens.append(token_id)
            if was_thinking:
                self._rest = self.decoded
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
            WrittenAnswer(tokens=self._tokens, raw="".join(self._raw), rest=self._rest, parts=parts)
        )

    def _show(self, text: str) -> AnswerParts:
        self.decoded += len(text)
        parts = self._cut(self._parser.push(text))
        if self._parser.keep is not None:
            self._raw.append(text)
            self._parts.append(parts)
        return parts

    def _cut(self, parts: AnswerParts) -> AnswerParts:
        """Return parts of the answer up to a stop text; calls come after the text."""
        text = self._stops.push(parts.text)
        if self.stopped:
            return replace(parts, text=text, calls=())
        if parts.calls:  # a stop text does not begin before a call and end after it
            text += self._stops.finish()
        return replace(parts, text=text)
