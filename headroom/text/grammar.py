"""Grammars: which tokens may come next in an answer that must match a schema or a grammar.

llguidance compiles and runs the grammars. A grammar is compiled once for a model's vocabulary. Each
answer has a state of its own, which takes the answer's tokens and gives a mask before each of them.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from headroom.errors import HeadroomError, RequestError
from headroom.text.conversation import OutputFormat
from headroom.text.json_schemas import JSON_OPTIONS, sum_divisors, without_annotations
from headroom.text.schema_faults import (
    LIMITS,
    MOST_GRAMMAR_CHARACTERS,
    QUIET,
    find_fault,
    plain_reason,
)
from headroom.text.string_schemas import ASCII_CLASSES
from headroom.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.uint32]  # token t is bit t % 32 of word t // 32

MOST_DIVISORS = 100_000  # sum of all `multipleOf` of a schema: it then compiles within a second
KEPT_GRAMMARS = 64  # compiled grammars that are kept for later requests


class Grammar:
    """A compiled grammar, which many answers can use."""

    def __init__(self, start: LLMatcher, vocab: int) -> None:
        self._start = start
        self._vocab = vocab

    def begin(self) -> "GrammarState":
        """Return the state of an answer that has no tokens yet."""
        return GrammarState(self._start.deep_copy(), self._vocab)

    def count_matching(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens of an answer match."""
        return self._start.deep_copy().try_consume_tokens(list(tokens))

    def after(self, tokens: Sequence[int]) -> "Grammar":
        """Return the grammar of what may follow an answer's first tokens, all of which match."""
        matcher = self._start.deep_copy()
        matcher.consume_tokens(list(tokens))
        assert not matcher.is_error()
        return Grammar(matcher, self._vocab)


class GrammarState:
    """The state of one answer in its grammar.

    The model's stop tokens are allowed where the answer may end, and only there.
    """

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab // 32)

    def may_limit(self, unread: int) -> bool:
        """Return True: a grammar may limit any token."""
        return True

    def mask(self) -> Mask:
        """Return the mask of the tokens that may come next; it allows at least one."""
        words: Mask = np.empty(self._words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def advance(self, token: int) -> None:
        """Take the next token of the answer."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def may_end(self) -> bool:
        """Whether the answer so far is complete."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise HeadroomError(f"The answer's grammar failed: {reason_of(self._matcher)}.")


class GrammarCompiler:
    """Compiles output formats to grammars for the vocabulary of one model; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab  # number of logits; those beyond the vocabulary are never allowed
        self._lock = threading.Lock()  # guards the two fields below
        self._tokens: LLTokenizer | None = None  # built when first needed: it takes half a second
        self._kept: OrderedDict[str, Grammar] = OrderedDict()  # least recently used first

    @cached_property
    def without_stops(self) -> Mask:
        """The mask of all tokens but the stop tokens."""
        tokenizer, known = self.tokenizer, range(min(self.vocab, self.tokenizer.vocab_size))
        ends = tokenizer.stop_ids
        return token_bits(
            (i for i in known if i not in ends and not tokenizer.is_unused(i)), self.vocab
        )

    def compile(
        self,
        wanted: Sequence[OutputFormat],
        *,
        after_thought: bool = False,  # the answer may come after a thought
        continues: bool = False,  # the answer continues the prompt's text
        begun: str = "",  # the answer's first words, which the prompt has; they must match, too
    ) -> Grammar:
        """Return the grammar of answers that match one of the output formats.

        Before the answer, the grammar allows the line breaks that models write after a thought, and
        the blank that SentencePiece adds and decoding drops. A format that cannot be compiled, and
        one that the first words do not match, raises RequestError.
        """
        grammar = self._compiled(wanted, after_thought=after_thought, continues=continues)
        return self._after(grammar, begun, wanted[-1]) if begun else grammar

    def _after(self, grammar: Grammar, begun: str, wanted: OutputFormat) -> Grammar:
        """Return the grammar of what follows an answer's first words, or refuse them."""
        assert self._tokens is not None
        tokens = self._tokens.greedy_tokenize(begun)
        if (matched := grammar.count_matching(tokens)) < len(tokens):
            said = self._tokens.decode_bytes(tokens[:matched]).decode(errors="ignore")
            raise RequestError(
                f"The answer that the last message begins does not match the "
                f"{_NAMES[wanted.kind]}: only its first {len(said)} of {len(begun)} characters do.",
                hint="Change that message, or leave out the format.",
                param=wanted.param,
            )
        return grammar.after(tokens)

    def _compiled(
        self, wanted: Sequence[OutputFormat], *, after_thought: bool, continues: bool
    ) -> Grammar:
        """Return a compiled grammar, a kept one if there is one."""
        text = _grammar_text(
            wanted, "" if continues and not after_thought else self._leading(after_thought)
        )
        with self._lock:
            if (known := self._kept.get(text)) is not None:
                self._kept.move_to_end(text)
                return known
            if self._tokens is None:
                self._tokens = _token_trie(self.tokenizer, self.vocab)
        matcher = LLMatcher(self._tokens, text, log_level=QUIET, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(wanted, reason_of(matcher))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # for example a rule that only refers to itself
            raise _refusal(wanted, "no answer can match it")
        grammar = Grammar(matcher, self.vocab)
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _leading(self, after_thought: bool) -> str:
        """Return a regular expression of white space that may come before the answer; "": none."""
        if self.tokenizer.drops_blank:
            return r"[ \n]{1,2}" if after_thought else " "
        return r"\n{1,2}" if after_thought else ""


def reason_of(matcher: LLMatcher) -> str:
    """Return why a grammar failed, without the backtrace of a panic in llguidance."""
    return matcher.get_error().partition("<backtrace>")[0].strip()


def _refusal(wanted: Sequence[OutputFormat], reason: str) -> RequestError:
    """Return the error of formats that cannot be compiled: the schema that fails, if one does."""
    for one in wanted:
        if one.kind == "json_schema" and (fault := find_fault(one.value)):
            return RequestError(
                f"The JSON schema cannot be used, at {fault.path or 'its root'}: {fault.reason}.",
                hint="Leave out what is not supported, or describe it in another way.",
                param=one.param,
            )
    if wanted[0].kind in ("json_schema", "json_object"):
        reason = plain_reason(reason)
    return RequestError(
        f"The {_NAMES[wanted[0].kind]} cannot be used: {reason}.", param=wanted[0].param
    )


def token_bits(tokens: Iterable[int], vocab: int) -> Mask:
    """Return the mask that allows some tokens of a vocabulary of `vocab` tokens."""
    allowed = np.zeros(-(-vocab // 32) * 32, dtype=np.bool_)
    allowed[list(tokens)] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "choice": "list of choices",
}


def _grammar_text(wanted: Sequence[OutputFormat], leading: str) -> str:
    """Return output formats as llguidance reads them: a JSON object with a list of grammars."""
    grammars = [_one_grammar(one) for one in wanted]
    if leading or len(grammars) > 1:
        for place, grammar in enumerate(grammars):
            grammar["name"] = f"answer{place}"
        start = " | ".join(f"@answer{place}" for place in range(len(grammars)))
        start = f"start: LEADING? ({start})\nLEADING: /{leading}/" if leading else f"start: {start}"
        grammars.insert(0, {"lark_grammar": start})
    text = json.dumps({"grammars": grammars})
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"The {_NAMES[wanted[0].kind]} has {len(text):,} characters; at most "
            f"{MOST_GRAMMAR_CHARACTERS:,} can be compiled.",
            hint="Shorten it: leave out descriptions, or allow any value in some places.",
            param=wanted[0].param,
        )
    return text


def _one_grammar(wanted: OutputFormat) -> dict[str, Any]:
    value = wanted.value
    if wanted.kind == "json_object":
        return _json_grammar({"type": "object"})
    if wanted.kind == "json_schema":
        if not isinstance(value, dict | bool):
            raise _wrong_type(wanted, "an object")
        try:
            check_divisors(value, wanted.param)
            return _json_grammar(value)
        except RecursionError as error:
            raise RequestError(
                "The JSON schema is nested too deeply.",
                hint="Flatten the schema: move inner objects up, or to $defs.",
                param=wanted.param,
            ) from error
    if wanted.kind == "choice":
        texts = list(value) if isinstance(value, list | tuple) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise _wrong_type(wanted, "a list of texts that are not empty")
        return {"lark_grammar": "start: " + " | ".join(map(json.dumps, texts))}
    if not isinstance(value, str) or not value:
        raise _wrong_type(wanted, "a text that is not empty")
    if wanted.kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(value, ASCII_CLASSES)}/"}
    return {"lark_grammar": value}


def check_divisors(schema: Any, param: str) -> None:
    """Raise RequestError if the `multipleOf` of a schema would take too long to compile."""
    if (total := sum_divisors(schema)) > MOST_DIVISORS:
        raise RequestError(
            "The divisors (multipleOf) in the JSON schema, without their decimal points, add up to "
            f"{total:,}; at most {MOST_DIVISORS:,} can be compiled.",
            hint="Leave out multipleOf, or use smaller or rounder divisors.",
            param=param,
        )


def _json_grammar(schema: Any) -> dict[str, Any]:
    schema = without_annotations(schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return {"json_schema": schema}


def _wrong_type(wanted: OutputFormat, needed: str) -> RequestError:
    given = type(wanted.value).__name__
    if isinstance(wanted.value, str | list) and not wanted.value:
        given = f"empty {given}"
    return RequestError(
        f"The {_NAMES[wanted.kind]} must be {needed}, not a value of type {given}.",
        param=wanted.param,
    )


class _TokenList:
    """A vocabulary with the attributes that llguidance reads."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        known = range(min(vocab, tokenizer.vocab_size))
        unused = [b""] * (vocab - len(known))  # llguidance never allows a token without bytes
        self.tokens = [
            b"" if tokenizer.is_unused(i) else tokenizer.token_bytes(i) for i in known
        ] + unused
        self.special_token_ids = [i for i in known if tokenizer.is_control(i) and self.tokens[i]]
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = min(i for i in tokenizer.stop_ids if i < vocab)
        self._tokenizer = tokenizer
        self.greedy: Callable[[str], Sequence[int]] = lambda text: list(text.encode())

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that a model would write for a text inside an answer.

        A SentencePiece tokenizer adds a blank before the text. Then the text is encoded after
        another character, whose tokens are dropped.
        """
        for before in ("", "\x02", "\n"):
            ids = self._tokenizer.encode(before + text, special=False, add_bos=False)
            dropped = self._tokenizer.encode(before, special=False, add_bos=False) if before else []
            ids = ids[len(dropped) :]
            if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode():
                return ids
        return list(self.greedy(text))


def _token_trie(tokenizer: Tokenizer, vocab: int) -> LLTokenizer:
    """Return llguidance's trie of a vocabulary, in which every stop token ends an answer."""
    stops = sorted(i for i in tokenizer.stop_ids if i < vocab)
    if not stops:
        raise RequestError("The model has no token that ends an answer, which a grammar needs.")
    tokens = _TokenList(tokenizer, vocab)
    trie = LLTokenizer(tokens, n_vocab=vocab, eos_token=stops)  # type: ignore[arg-type]
    tokens.greedy = trie.greedy_tokenize
    return trie
