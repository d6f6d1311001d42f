"""Thought budgets: how many tokens a model may think, and the constraint that ends its thought.

When the budget is spent, the constraint forces the tokens with which the model usually ends a
thought. The grammar of the answer, if there is one, begins after the thought.
"""

from dataclasses import dataclass
from enum import Enum, auto

from headroom.errors import RequestError
from headroom.text.conversation import Thinking
from headroom.text.grammar import GrammarCompiler, GrammarState, Mask, token_bits
from headroom.text.reasoning import Reasoning
from headroom.text.tokenizer import Tokenizer

REPLY_TOKENS = 4096  # reserved for the text after a thought, but at most REPLY_SHARE of the answer
REPLY_SHARE = 0.25
# The budget of each reasoning effort, as a share of the longest possible thought.
EFFORT_SHARES = {
    "none": 0.0,
    "minimal": 1 / 32,
    "low": 1 / 8,
    "medium": 1 / 2,
    "high": 1.0,
    "xhigh": 1.0,
    "max": 1.0,
}


def resolve_effort(thinking: Thinking) -> Thinking:
    """Return the settings with thinking turned on or off by the effort, unless it is set already.

    An unknown effort raises RequestError.
    """
    if thinking.effort is None:
        return thinking
    if thinking.effort not in EFFORT_SHARES:
        raise RequestError(
            f"The reasoning effort {thinking.effort[:40]!r} is not known.",
            hint=f"Use one of {', '.join(EFFORT_SHARES)}.",
            param="reasoning_effort",
        )
    enabled = thinking.enabled
    if enabled is None:
        enabled = thinking.effort != "none"
    return Thinking(enabled=enabled, effort=thinking.effort, budget=thinking.budget)


def thought_tokens(thinking: Thinking, answer_tokens: int) -> int | None:
    """Return the budget of a thought in an answer of at most `answer_tokens`; None: no limit.

    A budget always leaves room for a reply.
    """
    if thinking.budget is None and thinking.effort is None:
        return None
    reply = min(REPLY_TOKENS, int(answer_tokens * REPLY_SHARE))
    longest = max(0, answer_tokens - reply)
    if thinking.budget is not None:
        return max(0, min(thinking.budget, longest))
    assert thinking.effort is not None
    return int(longest * EFFORT_SHARES[thinking.effort])


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtRules:
    """Whether an answer begins with a thought, and how long the thought may be."""

    reasoning: Reasoning
    opened: bool  # the prompt ends inside a thought
    may_open: bool  # the answer may begin with a thought
    budget: int | None  # tokens that the thought may have; None: no limit


class _Phase(Enum):
    BEFORE = auto()  # no token has come, or only white space: a thought may begin
    OPEN = auto()  # inside the thought
    CLOSING = auto()  # the budget is spent, and the tokens that end the thought are forced
    AFTER = auto()  # after the thought, or the answer has none


class AnswerConstraint:
    """Limits the thought of one answer to a budget, and what follows it to a grammar."""

    def __init__(
        self, rules: ThoughtRules, compiler: GrammarCompiler, grammar: GrammarState | None
    ) -> None:
        self._rules = rules
        self._compiler = compiler
        self._tokenizer = tokenizer = compiler.tokenizer
        self._vocab = compiler.vocab
        self._grammar = grammar
        self._closing = closing_tokens(rules.reasoning, tokenizer)
        self._forced = 0  # tokens of `_closing` that have come
        self._thought = 0  # tokens of the thought so far
        self.closed_hard = False  # the budget ended the thought, not the model
        self._phase = _Phase.AFTER
        if rules.opened:
            self._open()
        elif rules.may_open:
            self._phase = _Phase.BEFORE

    def may_limit(self, unread: int) -> bool:
        """Whether the token after the next `unread` tokens may be limited, whatever those are."""
        if self._grammar is not None or self._phase is _Phase.CLOSING:
            return True
        if self._phase is _Phase.AFTER or self._rules.budget is None:
            return False
        return self._thought + unread >= self._rules.budget

    def mask(self) -> Mask | None:
        """Return the mask of the tokens that may come next; None if any token may come."""
        reasoning, grammar = self._rules.reasoning, self._grammar
        if self._phase is _Phase.CLOSING:
            return token_bits([self._closing[self._forced]], self._vocab)
        if grammar is None:
            return None
        if self._phase is _Phase.OPEN:  # an answer that ends in its thought matches no grammar
            return self._compiler.without_stops
        allowed = grammar.mask()
        if self._phase is _Phase.BEFORE:
            allowed |= token_bits([reasoning.start_id], self._vocab)
        return allowed

    def advance(self, token: int) -> None:
        """Take the next token of the answer."""
        if self._phase is _Phase.BEFORE:
            self._begin(token)
        elif self._phase is _Phase.OPEN:
            self._think(token)
        elif self._phase is _Phase.CLOSING:
            self._forced += 1
            if self._forced == len(self._closing):
                self._phase = _Phase.AFTER
        elif self._grammar is not None:
            self._grammar.advance(token)

    def _begin(self, token: int) -> None:
        if token == self._rules.reasoning.start_id:
            self._open()
        elif self._grammar is not None:
            self._phase = _Phase.AFTER
            self._grammar.advance(token)
        elif not self._tokenizer.token_bytes(token).isspace():
            self._phase = _Phase.AFTER

    def _open(self) -> None:
        self._phase = _Phase.OPEN
        self._close_if_spent()

    def _think(self, token: int) -> None:
        self._thought += 1
        if token == self._rules.reasoning.end_id:
            self._phase = _Phase.AFTER
        else:
            self._close_if_spent()

    def _close_if_spent(self) -> None:
        budget = self._rules.budget
        if budget is not None and self._thought >= budget:
            self._phase = _Phase.CLOSING
            self.closed_hard = True


def closing_tokens(reasoning: Reasoning, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a thought: the end mark, with the chat template's white space."""
    ids = tokenizer.encode(reasoning.closing, add_bos=False)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    # A tokenizer that adds a blank would change the text; then the mark alone is forced.
    return tuple(ids) if ids and text == reasoning.closing else (reasoning.end_id,)
