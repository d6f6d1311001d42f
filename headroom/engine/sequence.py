"""Sequence: the tokens, pages and progress of one request."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headroom.engine.pooling import PooledRows
from headroom.engine.request import (
    GenerationRequest,
    Timings,
    TokenEvent,
    TokenLogprobs,
)
from headroom.split.upkeep import ExpertTelemetry


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine; only the engine's thread changes it."""

    request: GenerationRequest
    on_event: Callable[[TokenEvent], None]
    limit: int  # tokens, prompt included, at which the answer ends
    # The prompt, then generated tokens. The last `unread` entries are placeholders for tokens that
    # a device has drawn and the host has not read yet.
    tokens: list[int] = field(default_factory=list)
    unread: int = 0
    cached: int = 0  # tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)
    # `pages` as a tensor, with the list and the length that it was made from.
    _table: tuple[list[int], int, torch.Tensor] | None = None
    state_slot: int = 0  # number among the running ones; states and window pages go by it
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pooled: PooledRows | None = None  # of a request with pooling
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None  # start of its first step
    first_token_at: float | None = None
    experts_before: ExpertTelemetry | None = None  # counters before its first step

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        if self.request.pooling is not None:
            self.pooled = PooledRows(self.request.pooling)

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet: 1 in decode, more in prefill."""
        return len(self.tokens) - self.cached

    @property
    def generated(self) -> int:
        """Tokens generated so far, unread ones not counted."""
        return len(self.tokens) - self.unread - len(self.request.prompt)

    @property
    def ending(self) -> bool:
        """Whether its last token is drawn, read or not."""
        return len(self.tokens) >= self.limit

    def learn(self, index: int, token: int) -> None:
        """Add the next token, or replace the placeholder of an unread one."""
        if index == len(self.tokens):
            self.tokens.append(token)
        else:
            self.tokens[index] = token
            self.unread -= 1

    def page_table(self) -> torch.Tensor:
        """Return the pages as an int64 tensor; it is made anew only if the pages have changed."""
        pages, known = self.pages, self._table
        if known is None or known[0] is not pages or known[1] != len(pages):
            known = self._table = (pages, len(pages), torch.tensor(pages, dtype=torch.int64))
        return known[2]

    def timings(self) -> Timings:
        """Return where the request's time went, up to now."""
        now = time.perf_counter()
        started = self.started_at or now
        first = self.first_token_at or now
        return Timings(
            queue_s=started - self.submitted_at,
            prefill_s=first - started,
            decode_s=now - first,
        )
