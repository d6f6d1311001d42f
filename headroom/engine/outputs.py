"""Output rows of a step: rows that predict a token, which the host or a device draws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headroom.engine.batching import output_rows, wants_prompt_logprobs
from headroom.engine.request import TokenConstraint, TokenLogprobs
from headroom.engine.sampler import LogitRow, sample, token_logprobs
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence as Running
from headroom.errors import ModelError
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.batch import Span
from headroom.layers.draws import Draw, TokenMask
from headroom.split.stage import StepResult


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One output row: it predicts the token after `position`."""

    sequence: Running
    position: int
    scores_prompt: bool  # the logprob of the prompt's own next token is wanted
    draws: bool  # the next token is drawn from this row
    pools: bool = False  # its hidden state goes into the vector of the prompt
    constraint: TokenConstraint | None = None  # limits the token; None: any token may be drawn
    keeps_logits: bool = False  # the prefix cache keeps the logits
    # The row has guesses in its turn, or is one. The host draws its token, since that depends on
    # which guesses are right.
    guessed: bool = False

    def needs_logits(self, token: int | None) -> bool:
        """Whether the row's logits are needed, besides the token that a device may have drawn."""
        params = self.sequence.request.params
        if self.scores_prompt or self.keeps_logits:
            return True
        return self.draws and (token is None or params.logprobs is not None)

    def score_prompt(self, logits: LogitRow) -> None:
        """Record the logprobs of the prompt's next token; nothing predicts the first token."""
        known, request = self.sequence.prompt_logprobs, self.sequence.request
        if not known:
            known.append(None)
        if self.position + 1 == len(known) < len(request.prompt):
            top = request.params.logprobs or 0
            known.append(token_logprobs(logits, request.prompt[self.position + 1], top))

    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Return the logprobs of the whole prompt for the answer's first event, else none."""
        request = self.sequence.request
        if not request.params.prompt_logprobs or self.token_index != len(request.prompt):
            return ()
        known = self.sequence.prompt_logprobs or [None]  # a prompt of one token has no other
        if len(known) < len(request.prompt):  # another answer to the prompt failed to score it
            raise ModelError(f"Logprobs of {len(request.prompt) - len(known)} tokens are missing.")
        return tuple(known)

    @property
    def token_index(self) -> int:
        """The index of the predicted token in its sequence."""
        return self.position + 1

    def choose(
        self, token: int | None, logits: LogitRow | None, mask: TokenMask | None
    ) -> "ChosenToken":
        """Return the next token, drawn here if no device has drawn it, and its logprobs."""
        params = self.sequence.request.params
        if token is None:
            assert logits is not None
            token = sample(logits, self.sequence.tokens, params, mask)
        if params.logprobs is None:
            return ChosenToken(token, None)
        assert logits is not None
        return ChosenToken(token, token_logprobs(logits, token, params.logprobs))


class ChosenToken(NamedTuple):
    """The token that follows a sequence."""

    id: int
    logprobs: TokenLogprobs | None  # None if not asked for


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that is launched and whose output rows are not read yet."""

    turns: list[Turn]
    outputs: list[Output]
    result: StepResult
    # By output row, filled in after the launch: the tokens that may be drawn; None: any.
    masks: dict[int, TokenMask | None] = field(default_factory=dict)
    # The next step may name tokens of this one that are not read yet. False: sequences with output
    # rows wait until this step is read, and steps of other sequences are launched meanwhile.
    ahead: bool = True
    spans: tuple[Span, ...] = ()  # of its turns

    @property
    def has_guesses(self) -> bool:
        """Whether some of its rows are guesses, of which only those that are right stay."""
        return any(turn.draft for turn in self.turns)

    @property
    def may_stay_unread(self) -> bool:
        """Whether the next step can be launched before this one is read.

        The device must draw all its tokens, unless results outlive the next step. If the next step
        computes rows of the same sequences, the device must keep the tokens for it, and no penalty
        of the next step may need them on the host.
        """
        if not self.ahead:
            return self.result.lasts or not self._needs_results
        if self.result.token_rows and not self.result.names_tokens:
            return False
        return (
            len(self.result.token_rows) <= DECODE_ROWS
            and not self._needs_results
            and not any(output.sequence.request.params.penalises for output in self.outputs)
        )

    @property
    def keeps_tokens(self) -> bool:
        """Whether a device keeps tokens of this step for the next one; it keeps no older ones."""
        return self.ahead and self.result.names_tokens and bool(self.result.token_rows)

    @property
    def _needs_results(self) -> bool:
        """Whether more is needed of any output row than a token that the device has drawn."""
        token_rows = self.result.token_rows
        return any(
            output.pools or output.needs_logits(token_rows.get(at))
            for at, output in enumerate(self.outputs)
        )

    def await_outputs(self) -> None:
        """Let the sequences with output rows wait until this step is read."""
        for output in self.outputs:
            output.sequence.awaited = True

    def end_await(self) -> None:
        """Let the sequences go on; their results are read now."""
        for output in self.outputs:
            output.sequence.awaited = False

    def add_placeholders(self) -> None:
        """Append placeholders for the tokens that are still on the device to their sequences."""
        for at, token_row in self.result.token_rows.items():
            sequence = self.outputs[at].sequence
            sequence.tokens.append(-1 - token_row)
            sequence.unread += 1


def list_outputs(turns: Sequence[Turn]) -> list[Output]:
    """Return the output rows of a step in order; call it before its rows count as cached."""
    outputs = []
    # By the identity of the logprobs of a prompt: how many tokens' are known after the step.
    known_after: dict[int, int] = {}
    for turn in turns:
        sequence, wants_logprobs = turn.sequence, wants_prompt_logprobs(turn)
        start, logprobs = sequence.cached, sequence.prompt_logprobs
        known = known_after.get(id(logprobs), max(len(logprobs), 1))  # nothing predicts the first
        last = start + turn.rows - 1 if turn.rows == sequence.pending else None
        pools = sequence.pooled is not None
        if turn.draft:
            outputs += _guessed_outputs(turn)
            continue
        for position in output_rows(turn, start):
            draws = position == last and not pools
            limits = sequence.request.constraint if draws else None
            if limits is not None and not limits.may_limit(sequence.unread):
                limits = None
            scores = wants_logprobs and known <= position + 1 < len(sequence.request.prompt)
            keeps = sequence.keeps_logits and position + 1 == len(sequence.request.prompt)
            outputs.append(Output(sequence, position, scores, draws, pools, limits, keeps))
            known += scores
        known_after[id(logprobs)] = known
    return outputs


def _guessed_outputs(turn: Turn) -> list[Output]:
    """Return the output rows of a turn with guesses: each predicts the token after its own.

    The first row's mask is computed while the step runs, those of guesses when they are right.
    """
    sequence, limits = turn.sequence, turn.sequence.request.constraint
    if limits is not None and not limits.may_limit(0):
        limits = None
    return [
        Output(
            sequence,
            sequence.cached + depth,
            scores_prompt=False,
            draws=True,
            constraint=limits if row == 0 else None,
            guessed=True,
        )
        for row, depth in enumerate(turn.draft.depths())
    ]


def list_draws(outputs: Sequence[Output]) -> list[Draw | None]:
    """Return how the token of each output row is drawn; None for rows that draw none."""
    return [
        Draw(
            output.sequence.request.params,
            output.sequence.tokens,
            limited=output.constraint is not None,
        )
        if output.draws and not output.guessed
        else None
        for output in outputs
    ]


class ReadOutput(NamedTuple):
    """An output row, and its results that were read from the device."""

    output: Output
    token: int | None  # drawn by the device; None: the host draws it, or no token is wanted
    logits: LogitRow | None  # None if they are not needed
    mask: TokenMask | None  # the tokens that the host may draw; None: any


def read_outputs(step: LaunchedStep, most: int) -> Iterator[ReadOutput]:
    """Wait for a step and yield its output rows in order.

    The logits of at most `most` rows are computed at a time: the plan has memory for that many.
    """
    outputs, result = step.outputs, step.result
    tokens = result.tokens()
    wanted = [row for row, output in enumerate(outputs) if output.needs_logits(tokens[row])]
    logits = _logit_rows(wanted, result, most)
    at = 0
    for row, output in enumerate(outputs):
        needed = at < len(wanted) and wanted[at] == row
        at += needed
        found = next(logits) if needed else None
        yield ReadOutput(output, tokens[row], found, step.masks.get(row))


def _logit_rows(wanted: Sequence[int], result: StepResult, most: int) -> Iterator[LogitRow]:
    for first in range(0, len(wanted), most):
        yield from result.logits(wanted[first : first + most]).numpy()
