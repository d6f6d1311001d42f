"""Sequence: tokens, pages and progress of one request."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headroom.engine.request import (
    GenerationRequest,
    Timings,
    TokenEvent,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine; the scheduler owns it and changes it at every step."""

    request: GenerationRequest
    on_event: Callable[[TokenEvent], None]
    limit: int  # tokens, prompt included, at which the answer ends
    order: int  # of arrival; a smaller number goes first
    tokens: list[int] = field(default_factory=list)  # prompt, then what was generated
    cached: int = 0  # tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)
    slot: int = 0  # its place among those that run; states and window pages go by it
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None  # of its first step
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet: one while decoding, more while reading."""
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    def timings(self) -> Timings:
        """Return where the time went, up to now."""
        now = time.perf_counter()
        started = self.started_at or now
        first = self.first_token_at or now
        return Timings(
            queue_s=started - self.submitted_at,
            prefill_s=first - started,
            decode_s=now - first,
        )
