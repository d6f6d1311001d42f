"""Sequence: the tokens, pages and progress of one request."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headroom.engine.pooling import PooledRows
from headroom.engine.prefix_cache import Prefix
from headroom.engine.prefix_folder import Loading
from headroom.engine.request import (
    GenerationRequest,
    Timings,
    TokenEvent,
    TokenLogprobs,
)
from headroom.spec.drafter import Guesser
from headroom.spec.governor import Acceptance
from headroom.split.stage_times import NamedTimes, StepParts
from headroom.split.upkeep import ExpertTelemetry


@dataclass(slots=True, eq=False)
class UnconfirmedSnapshot:
    """A snapshot whose step is launched and not read yet."""

    slot: int
    position: int  # tokens of the sequence
    passing: bool  # on the way through its prompt
    has_logits: bool = False  # those after its last token are kept


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
    # A step computes one of its output rows, whose token has no placeholder in `tokens` yet. So its
    # next step has to wait.
    awaited: bool = False
    cached: int = 0  # tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)
    _table: "_PageTable | None" = None  # of `pages`; None: not made yet
    state_slot: int = 0  # its number among the recurrent states and window pages
    prefix: Prefix | None = None  # a known prefix that its first step begins after
    starting: bool = False  # admitted, and nothing of it is launched yet
    loading: Loading | None = None  # a prefix that is read from a file for it
    reused: int | None = None  # prompt tokens that it found in the prefix cache; None: not started
    cuts: tuple[int, ...] | None = None  # where its prompt may be cut; None: not known yet
    keeps_logits: bool = False  # the logits after its prompt are kept with a snapshot
    stops: tuple[int, ...] = ()  # those of its cuts at which snapshots are taken
    # Snapshots of steps that may still fail, and the token after which the last one was taken.
    saved: "list[UnconfirmedSnapshot]" = field(default_factory=list)
    last_saved: int = 0
    pooled: PooledRows | None = None  # None if the request wants an answer, not a vector
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None  # start of its first step
    first_token_at: float | None = None
    guesser: Guesser | None = None  # guesses its next tokens; None: it has no guesses yet
    guessed: int = 0  # tokens that were guessed for it
    accepted: int = 0  # guesses that were right
    held_back: int = 0  # guesses that were not checked, since that would not have paid
    acceptance: Acceptance = field(default_factory=Acceptance)  # of its last guesses
    experts_before: ExpertTelemetry | None = None  # counters before its first step
    picks_before: torch.Tensor | None = None  # of all experts before its first step
    earlier_picks: torch.Tensor | None = None  # of its conversation up to its known prefix
    picks: torch.Tensor | None = None  # of its conversation, float32 [layers, experts], at its end
    stages_before: NamedTimes | None = None  # times of the stages before its first step
    parts_before: StepParts | None = None  # parts of all steps before its first step

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """The logprobs of the prompt's tokens so far; other answers to the prompt add to them."""
        return self.request.prompt_logprobs

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        if self.request.pooling is not None:
            self.pooled = PooledRows(self.request.pooling)

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet: 1 in decode, more in prefill."""
        return len(self.tokens) - self.cached

    @property
    def decodes(self) -> bool:
        """Whether its whole prompt is in the cache, or will be after the steps under way."""
        return self.pending <= 1

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
        """Return the pages as an int64 tensor; a new one is made only if the pages have changed."""
        pages, known = self.pages, self._table
        if known is None or known.pages is not pages or known.page_count != len(pages):
            tensor = torch.tensor(pages, dtype=torch.int64)
            known = self._table = _PageTable(pages, len(pages), tensor)
        return known.tensor

    def timings(self) -> Timings:
        """Return how long each phase of the request took, up to now."""
        now = time.perf_counter()
        started = self.started_at or now
        first = self.first_token_at or now
        return Timings(
            queue_s=started - self.submitted_at,
            prefill_s=first - started,
            decode_s=now - first,
            guessed=self.guessed,
            accepted=self.accepted,
            held_back=self.held_back,
        )


class _PageTable(NamedTuple):
    """A sequence's pages as a tensor, and the list that the tensor was made from."""

    pages: list[int]
    page_count: int  # pages in the list at that time
    tensor: torch.Tensor
