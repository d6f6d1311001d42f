"""Detokenizer: turns a stream of tokens into text, in whole characters."""

import codecs
from collections.abc import Container

from headroom.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one stream of tokens into pieces of text; joined, they are the text of all tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        show_control: bool = False,
        marks: Container[int] = (),  # control tokens that are shown nevertheless
        continues: bool = False,  # the tokens continue a text, so their first blank is kept
    ) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._marks = marks
        # The decoder keeps the bytes of an unfinished character until its other bytes come.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # SentencePiece adds a blank before a text: it is in the first token, and is dropped here.
        self._drops_blank = tokenizer.drops_blank and not continues

    def push(self, token_id: int) -> str:
        """Take one token and return the characters that it completes."""
        hidden = not self._show_control and token_id not in self._marks
        if hidden and self._tokenizer.is_control(token_id):
            return ""
        return self._shown(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return the rest: a replacement character if the last character is incomplete."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if text and self._drops_blank:
            self._drops_blank = False
            return text.removeprefix(" ")
        return text
