"""SchemaBench: decoding with and without a JSON schema, in turns in one run."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headroom.bench.figures import BenchSettings, Figures, SchemaFigure
from headroom.bench.workload import ConcurrentRequests
from headroom.engine.request import SamplingParams, TokenConstraint
from headroom.formats.vocabulary import Vocabulary
from headroom.layers.draws import TokenMask
from headroom.llm import OpenedModel
from headroom.text.conversation import OutputFormat
from headroom.text.grammar import Grammar, GrammarCompiler
from headroom.text.spelling import BYTE_OF
from headroom.text.tokenizer import Tokenizer

ITEMS = 100_000  # of the list that an answer is: no answer gets to its end
FEW_TOKENS = 0.5  # a vocabulary with a smaller share of used ids is filled up
# What programs ask for: an object of texts, numbers, a choice and a list.
TYPICAL: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "title": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["book", "film", "song", "game"]},
        "price": {"type": "number", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 5},
        "author": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "born": {"type": ["string", "null"], "format": "date"},
            },
            "required": ["name", "born"],
            "additionalProperties": False,
        },
        "in_stock": {"type": "boolean"},
    },
    "required": ["id", "title", "kind", "price", "tags", "author", "in_stock"],
    "additionalProperties": False,
}


class SchemaBench:
    """Measures batches that decode freely and under a schema, after one short context."""

    def __init__(
        self, opened: OpenedModel, settings: BenchSettings, tokenizer: Tokenizer, figures: Figures
    ) -> None:
        assert settings.schema is not None
        self._opened, self._settings, self._figures = opened, settings, figures
        vocab = opened.engine.vocab
        self._compiler = GrammarCompiler(full_vocabulary(tokenizer, vocab), vocab)
        self._grammar: Grammar = self._compiler.compile([endless_list(settings.schema)])
        self._params = SamplingParams(
            temperature=settings.temperature, ignore_eos=True, draft="none"
        )

    def run(self) -> None:
        """Measure every batch that runs together, and add the figures."""
        parallel = self._opened.plan.settings.parallel
        for batch in sorted(set(self._settings.batches)):
            if batch <= parallel:
                self._figures.schemas.append(self._measure(batch))
            else:
                self._figures.left_out.append(f"schema with batch {batch}: at most {parallel}")

    def _measure(self, batch: int) -> SchemaFigure:
        """Return the median of several rounds; both ways take turns, so that both warm up alike."""
        free, limited, timed = [], [], []
        for _ in range(self._settings.rounds):
            free.append(self._step_s([None] * batch))
            watched = [_Watched(self._grammar.begin()) for _ in range(batch)]
            limited.append(self._step_s(watched))
            timed += [seconds for one in watched for seconds in one.times[self._settings.warm :]]
        return SchemaFigure(
            batch=batch,
            context=min(self._settings.contexts),
            free_s=statistics.median(free),
            step_s=statistics.median(limited),
            mask_s=statistics.fmean(timed),
        )

    def _step_s(self, constraints: Sequence[TokenConstraint | None]) -> float:
        context = min(self._settings.contexts)
        engine = self._opened.engine
        requests = ConcurrentRequests(
            engine, context, len(constraints), self._params, constraints=constraints
        )
        try:
            requests.start()
            return requests.decode(self._settings.tokens, self._settings.warm).step_s
        finally:
            requests.close()


class _Watched:
    """A constraint whose time per token is noted."""

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint
        self._advance_s = 0.0
        self.times: list[float] = []  # seconds of host time for each token

    def may_limit(self, unread: int) -> bool:
        return self._constraint.may_limit(unread)

    def mask(self) -> "TokenMask | None":
        started = time.perf_counter()
        found = self._constraint.mask()
        self.times.append(time.perf_counter() - started + self._advance_s)
        return found

    def advance(self, token: int) -> None:
        started = time.perf_counter()
        self._constraint.advance(token)
        self._advance_s = time.perf_counter() - started


def endless_list(schema: Mapping[str, Any]) -> OutputFormat:
    """Return the format of a long list of what a schema describes, so that no answer ends."""
    item, root = dict(schema), {"type": "array", "minItems": ITEMS}
    for key in ("$defs", "definitions"):
        if key in item:
            root[key] = item.pop(key)
    return OutputFormat(kind="json_schema", value={**root, "items": item}, param="schema-file")


def full_vocabulary(tokenizer: Tokenizer, vocab: int) -> Tokenizer:
    """Return a model's tokenizer, or an invented one of its size if most of its ids are unused.

    Models with random weights have few tokens, with which masks would be computed too fast.
    """
    known = range(min(vocab, tokenizer.vocab_size))
    if sum(not tokenizer.is_unused(i) for i in known) >= FEW_TOKENS * vocab:
        return tokenizer
    words = _invented_words(vocab - len(BYTE_OF) - 1)
    tokens = [*BYTE_OF, *words, "<|end|>"]
    return Tokenizer.from_vocabulary(
        Vocabulary(
            model="gpt2",
            pre="qwen2",
            tokens=tokens,
            types=[*[1] * (len(tokens) - 1), 3],
            scores=[],
            merges=[],
            special_ids={"eos": len(tokens) - 1},
            add_bos=False,
        )
    )


def _invented_words(count: int) -> list[str]:
    """Return so many different tokens: words, parts of words, numbers and punctuation."""
    dice = random.Random(0)
    starts = ["", "Ġ", "Ġ", "_", "ĠĠĠĠ", '"', 'Ġ"', "{", "[", "-", "."]
    parts = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "ing", "er")]
    parts += [str(number) for number in range(100)] + ['"', '":', ",", "}", "]", "():", ";", "=="]
    found: dict[str, None] = {}
    while len(found) < count:
        word = dice.choice(starts) + "".join(dice.choices(parts, k=dice.choice((1, 2, 2, 3, 4))))
        if word not in BYTE_OF:
            found[word] = None
    return list(found)
