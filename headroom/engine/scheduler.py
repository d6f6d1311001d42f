"""Scheduler: which sequences run in the next step, with how many tokens, and which wait."""

import logging
from collections import deque
from dataclasses import dataclass

from headroom.engine.pages import PagePool
from headroom.engine.prefixes import Prefixes
from headroom.engine.sequence import Sequence
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.spec.draft import NO_DRAFT, Draft

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a step."""

    parallel: int  # sequences that run together
    chunk: int  # prompt tokens in one step
    page_size: int  # tokens in a page
    exact: bool = False  # what a step rounds must not depend on who shares it


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The share of one sequence in a step: its next `rows` tokens, and guesses of what follows."""

    sequence: Sequence
    rows: int
    draft: Draft = NO_DRAFT

    @property
    def all_rows(self) -> int:
        """The rows of its own tokens and of the guesses after them."""
        return self.rows + len(self.draft)


class Scheduler:
    """First come, first served; when pages run out, the newest sequence is preempted."""

    def __init__(self, limits: Limits, pool: PagePool, prefixes: Prefixes | None = None) -> None:
        self._limits = limits
        self._pool = pool
        self._prefixes = prefixes  # None: every sequence begins with its first token
        self._state_slots = PagePool(limits.parallel)  # of recurrent states and window pages
        self.waiting: deque[Sequence] = deque()
        # In the order in which they started. That is the order of `waiting`, but for sequences that
        # wait for a prefix. A preempted sequence, the last one that started, goes back to the front
        # of `waiting`.
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.most_running = limits.parallel  # sequences now: fewer while memory is short
        self.chunk = limits.chunk  # prompt tokens of a step now: fewer while memory is short
        self._decoded: list[Sequence] = []  # the sequences of the last step, if they decoded

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Remove a sequence that has ended, waiting or running, and free its pages.

        `keep`: its steps have succeeded, and what they computed may become a prefix.
        """
        if sequence in self.running:
            self._stop(sequence, keep=keep)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def decoding(self) -> int:
        """The running sequences that decode: those beyond their prompts."""
        return sum(sequence.decodes for sequence in self.running)

    def next_turns(self, parts: int = 1) -> list[Turn]:
        """Choose the rows of the next step and give their sequences the pages that they need.

        A sequence that waits for results is left out. A step has at most one of `parts` equal parts
        of the sequences that decode, so that several steps can be under way.
        """
        if self._limits.exact:
            return self._exact_turns(parts)
        turns = []
        prompt_rows = self.chunk
        decode_rows = -(-self.decoding // parts)
        for sequence in list(self.running):
            if sequence.ending or sequence.awaited or sequence not in self.running:
                continue  # nothing to compute yet, or any more; or an older one has preempted it
            decodes = sequence.pending == 1
            if decodes and not decode_rows:
                continue
            decode_rows -= decodes
            rows = 1 if decodes else self._prompt_rows(sequence, prompt_rows)
            if rows and self._give_pages(sequence, rows):
                turns.append(Turn(sequence, rows))
                prompt_rows -= 0 if decodes else rows
        while prompt_rows and (admitted := self._admit(prompt_rows)):
            turns.append(admitted)
            prompt_rows -= admitted.rows
        return turns

    def _exact_turns(self, parts: int) -> list[Turn]:
        """Choose a step of one prompt's rows, or of rows that decode, by turns if there are both.

        A GPU rounds the rows of a prompt alike in every step that has the same rows, and a row that
        decodes alike in every step of the decode path. So a sequence's rows are rounded as if it
        were alone.
        """
        ready = [x for x in self.running if not (x.ending or x.awaited)]
        prompts = [sequence for sequence in ready if sequence.pending > 1]
        decoding = [sequence for sequence in ready if sequence.pending == 1]
        turns: list[Turn] = []
        if self._decoded or not decoding:
            turns = self._prompt_turn(prompts)
        if not turns and decoding:
            turns = self._decode_turns(decoding, parts)
        self._decoded = [turn.sequence for turn in turns if turn.sequence in decoding]
        return turns

    def _prompt_turn(self, prompts: list[Sequence]) -> list[Turn]:
        """Choose the next rows of one prompt; a waiting one starts if none is running."""
        for sequence in prompts:
            rows = self._prompt_rows(sequence, self._limits.chunk)
            if sequence in self.running and self._give_pages(sequence, rows):
                return [Turn(sequence, rows)]
        admitted = self._admit(self._limits.chunk)
        return [] if admitted is None else [admitted]

    def _decode_turns(self, decoding: list[Sequence], parts: int) -> list[Turn]:
        """Choose rows that decode, those first that were not in the last step."""
        most = min(DECODE_ROWS, -(-self.decoding // parts))
        chosen = sorted(decoding, key=lambda sequence: sequence in self._decoded)[:most]
        turns = []
        for sequence in [x for x in decoding if x in chosen]:  # the newest last: it is preempted
            if sequence in self.running and self._give_pages(sequence, 1):
                turns.append(Turn(sequence, 1))
        return turns

    def room_for(self, sequence: Sequence, rows: int) -> int:
        """Give a running sequence pages for `rows` more tokens, as far as pages are free.

        Return for how many tokens there is room. No sequence is preempted for them.
        """
        wanted = self._pages_for(sequence.cached + rows) - len(sequence.pages)
        if (taken := min(wanted, self._pool.free)) > 0:
            sequence.pages += self._pool.take(taken)
        return min(rows, len(sequence.pages) * self._limits.page_size - sequence.cached)

    def _admit(self, prompt_rows: int) -> Turn | None:
        """Start the first waiting sequence if a state slot and enough pages are free."""
        if not self.waiting or len(self.running) >= self.most_running:
            return None
        sequence = self._first_ready()
        if sequence is None:
            return None
        # Room for one token more than it has, so that its first decode step needs no new page.
        if self._pages_for(len(sequence.tokens) + 1) - len(sequence.pages) > self._pool.free:
            if self._prefixes is not None:
                self._prefixes.leave(sequence)
                self._prefixes.need_pages()
            return None
        self.waiting.remove(sequence)
        sequence.state_slot = self._state_slots.take(1)[0]
        sequence.starting = True
        self.running.append(sequence)
        rows = self._prompt_rows(sequence, prompt_rows)
        given = self._give_pages(sequence, rows)
        assert given
        return Turn(sequence, rows)

    def _first_ready(self) -> Sequence | None:
        """Return the first waiting sequence that can start now, with its known prefix.

        Later sequences may pass one that waits for its prefix to be computed or read.
        """
        for sequence in self.waiting:
            if sequence.awaited:  # it was preempted while its next token was being computed
                return None
            if self._prefixes is None:
                return sequence
            self._prefixes.find(sequence)
            if not self._prefixes.waits(sequence, self.running):
                return sequence
            self._prefixes.leave(sequence)
        return None

    def _prompt_rows(self, sequence: Sequence, most: int) -> int:
        """Return how many of its prompt's next rows a sequence computes in this step."""
        rows = min(sequence.pending, most)
        return rows if self._prefixes is None else self._prefixes.rows(sequence, rows)

    def _give_pages(self, sequence: Sequence, rows: int) -> bool:
        """Give a running sequence pages for `rows` more tokens; False if it had to be preempted."""
        while (needed := self._pages_for(sequence.cached + rows) - len(sequence.pages)) > 0:
            if needed <= self._pool.free:
                sequence.pages += self._pool.take(needed)
                break
            if self._prefixes is not None:
                self._prefixes.need_pages()
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to the front of the queue; it will be computed again."""
        log.info(
            "pressure: request %s is preempted after %d tokens, which gives back %d pages; "
            "%d of %d pages are free",
            *(sequence.request.id, sequence.cached, len(sequence.pages)),
            *(self._pool.free, self._pool.total),
        )
        self._stop(sequence, keep=True)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _stop(self, sequence: Sequence, *, keep: bool) -> None:
        """Stop a running sequence and free its pages and its state slot; its tokens stay."""
        if self._prefixes is not None:
            self._prefixes.end(sequence, keep=keep and not sequence.starting)
        self.running.remove(sequence)
        self._state_slots.give_back([sequence.state_slot])
        self._pool.give_back(sequence.pages)
        sequence.pages = []
        sequence.cached = 0
        sequence.prefix, sequence.starting = None, False

    def step_back(self, turns: list[Turn]) -> None:
        """Put the sequences of a step that failed back to the front of the queue, in their order.

        What earlier steps have computed may become a prefix, but not the states of the sequences,
        which the step may have changed in some layers.
        """
        for turn in reversed(turns):
            if turn.sequence in self.running:
                turn.sequence.last_saved = turn.sequence.cached  # so that no snapshot is taken
                self._stop(turn.sequence, keep=True)
                self.waiting.appendleft(turn.sequence)
                self.preemptions += 1

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.page_size)
