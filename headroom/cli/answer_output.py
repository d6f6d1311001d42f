"""AnswerOutput: shows an answer as it comes; AnswerStats: what it took."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal

from headroom.cli.terminal_text import TerminalText, terminal_width
from headroom.units import counted

if TYPE_CHECKING:
    from headroom.answers import AnswerDelta, Completion
    from headroom.engine.request import SamplingParams

Thoughts = Literal["shown", "folded", "hidden"]  # how a terminal shows them; a pipe gets none
DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # a terminal's sequences for faint and for normal text
CLEAR_LINE = "\r\x1b[K"
FOLDED_S = 0.1  # seconds between changes of the line that counts a folded thought's tokens


class AnswerOutput:
    """Writes the deltas of an answer: wrapped to a terminal, thoughts dimmed; as is to a file."""

    def __init__(
        self,
        file: IO[str],
        *,
        terminal: bool,
        thoughts: Thoughts = "shown",
        clock: Callable[[], float] = time.monotonic,
        width: Callable[[], int] = terminal_width,
    ) -> None:
        self._file = file
        self._thoughts: Thoughts = thoughts if terminal else "hidden"
        self._clock = clock
        self._width = width
        self._wrapped = TerminalText(file, width) if terminal else None
        self._thought: TerminalText | None = None  # while a thought is under way
        self._thought_began = 0.0  # seconds of the clock
        self._thought_tokens = 0
        self._counted_at = 0.0  # when the folded thought's line last changed
        self._last_char = ""  # of the text

    def write(self, delta: "AnswerDelta") -> None:
        """Write what a delta adds."""
        if delta.thought and self._thoughts != "hidden":
            self._think(delta)
        if delta.text:
            if self._thought is not None:
                self._end_thought()
                self._file.write("\n")
            self._last_char = delta.text[-1]
            if self._wrapped is not None:
                self._wrapped.write(delta.text)
            else:
                self._file.write(delta.text)
        self._file.flush()

    def finish(self) -> None:
        """End the last line, whether the answer is complete or was stopped."""
        if self._thought is not None:
            self._end_thought()
        if self._wrapped is not None:
            self._wrapped.finish()
        if self._last_char != "\n":
            self._file.write("\n")
        self._file.flush()

    def _think(self, delta: "AnswerDelta") -> None:
        text = delta.thought
        if self._thought is None:
            self._thought = TerminalText(self._file, self._width)
            self._thought_began = self._clock()
            self._file.write(DIM)
            text = text.lstrip()
        self._thought_tokens = delta.thought_tokens
        if self._thoughts == "shown":
            self._thought.write(text)
        elif self._clock() - self._counted_at >= FOLDED_S:
            self._counted_at = self._clock()
            self._file.write(f"{CLEAR_LINE}thinking, {counted(self._thought_tokens, 'token')}")

    def _end_thought(self) -> None:
        """End the line of a thought."""
        assert self._thought is not None
        self._last_char = "\n"
        if self._thoughts == "folded":
            seconds = self._clock() - self._thought_began
            tokens = counted(self._thought_tokens, "token")
            self._file.write(f"{CLEAR_LINE}thought for {seconds:.1f} s, {tokens}{PLAIN}\n")
        else:
            self._thought.finish()
            self._file.write(PLAIN + ("" if self._thought.at_line_start else "\n"))
        self._thought = None


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """What one answer took."""

    prompt_tokens: int
    generated_tokens: int
    thought_tokens: int  # those of the generated tokens that are thoughts
    first_token_s: float  # from the question to the first token
    decode_s: float  # from the first token to the last
    hit_rate: float | None  # share of picked experts in GPU memory; None: all are, or none exist
    cached_tokens: int = 0  # of the prompt, which an earlier request had computed
    guessed_tokens: int = 0  # by a drafter
    accepted_tokens: int = 0  # of the guessed ones, those that were right

    @classmethod
    def of(cls, last: "AnswerDelta | Completion") -> "AnswerStats":
        """Return the figures that an answer's last delta has, or a whole answer."""
        timings = last.timings
        rate = (timings.experts or {}).get("hit_rate")
        return cls(
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            generated_tokens=last.generated_tokens,
            thought_tokens=last.thought_tokens,
            first_token_s=timings.queue_s + timings.prefill_s,
            decode_s=timings.decode_s,
            hit_rate=rate if isinstance(rate, float) else None,
            guessed_tokens=timings.guessed,
            accepted_tokens=timings.accepted,
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None if no further token came."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    def line(self) -> str:
        """Return the figures as one line."""
        parts = [
            f"first token {shown_seconds(self.first_token_s)}",
            f"prompt {self.prompt_tokens}"
            + (f" ({self.cached_tokens} cached)" if self.cached_tokens else ""),
            f"answer {counted(self.generated_tokens, 'token')}",
        ]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.hit_rate is not None:
            parts.append(f"expert hits {100 * self.hit_rate:.0f} %")
        if self.guessed_tokens:
            parts.append(f"accepted drafts {self.accepted_tokens} of {self.guessed_tokens}")
        return ", ".join(parts)


def shown_seconds(seconds: float) -> str:
    """Return a time as people read it: 350 ms, 12.82 s."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def cut_note(
    answer: "AnswerDelta | Completion", params: "SamplingParams", context: int
) -> str | None:
    """Return the note on an answer that the end of the context cut; None for any other answer."""
    wanted, generated = params.max_tokens, answer.generated_tokens
    if answer.finish_reason != "length" or (wanted is not None and generated >= wanted):
        return None
    asked = "" if wanted is None else f", not {wanted} (--max-tokens)"
    ends = f"where the context of {context} tokens ends"
    return f"cut after {counted(generated, 'token')}{asked}, {ends}; raise --context"
