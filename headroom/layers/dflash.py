"""DFlashNetwork: a DFlash draft, which fills a block of masked tokens in one pass.

The draft reads the outputs of some layers of its target, its features. One projection turns the
features of a token into a row, from which each layer of the draft computes the token's key and
value. These are kept, so that a token's features are needed once, after the step that computed it.
To guess, the draft runs a block: the sequence's last token, then masks. Each mask sees all tokens
of the sequence and, in layers that are not causal, the whole block; its output is the guess for its
own position. Embedding and head are the target's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from headroom.families.config import AttentionConfig, DraftConfig, FfnConfig, LayerConfig
from headroom.layers.attention import Attention
from headroom.layers.batch import Batch, Span
from headroom.layers.block import PreNormBlock
from headroom.layers.cache import KvPages, allocate_kv
from headroom.layers.draft_network import Asked, Guessed, pages_ahead
from headroom.layers.guesses import Accepted
from headroom.layers.modules import Linear, Mlp, RmsNorm
from headroom.layers.weights import WeightSource
from headroom.plan.settings import PlanSettings

CANDIDATES = 8  # tokens of each position of the block that a tree chooses from
LEARNED_ROWS = 128  # rows whose features are projected at a time: more would take more memory


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a draft uses of its target."""

    embed: Callable[[torch.Tensor], torch.Tensor]  # rows of token ids, float32 [rows, hidden]
    # Logits [rows, vocabulary] of rows that the draft has normed; valid until the next call.
    score: Callable[[torch.Tensor], torch.Tensor]
    logits_rows: int  # most rows that `score` takes
    # Features of rows of the last step, float32 [rows, layers, hidden], by the first row and the
    # number of rows.
    features: Callable[[int, int], torch.Tensor]


class DFlashNetwork:
    """The layers of a draft with their caches of keys and values."""

    def __init__(
        self,
        config: DraftConfig,
        get: WeightSource,  # of the draft's file
        settings: PlanSettings,
        target: Target,
    ) -> None:
        self._config, self._settings, self._target = config, settings, target
        case = get.case
        self._project = Linear(get("features.proj"), case)
        self._feature_norm = RmsNorm(get.norm("features.norm"), config.norm_eps, case)
        self._layers = [
            _DraftLayer(layer, causal, config, get.at(f"layers.{number}.", get.line), settings)
            for number, (layer, causal) in enumerate(zip(config.layers, config.causal, strict=True))
        ]
        self._norm = RmsNorm(get.norm("norm"), config.norm_eps, case)
        # The projected features of a step's rows.
        self._context = torch.empty(settings.rows, config.hidden)

    @property
    def pages(self) -> list[KvPages]:
        """The keys and values of all layers; their pages are those of the engine's sequences."""
        return [layer.pages for layer in self._layers]

    @property
    def state_bytes(self) -> int:
        """The bytes of what belongs to a step and to no sequence."""
        return self._context.nbytes

    @torch.inference_mode()
    def learn(self, stream: torch.Tensor, batch: Batch) -> None:
        """Cache the keys and values of a step's rows, but for those of guessed spans."""
        kept = [Accepted(span, tuple(range(span.rows))) for span in batch.spans if not span.guessed]
        self.commit(kept)

    @torch.inference_mode()
    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Cache the keys and values of the accepted rows of the last step."""
        places: list[int] = []
        spans: list[Span] = []
        for one in accepted:
            first, rows = len(places), len(one.rows)
            places += (one.span.first_row + row for row in one.rows)
            spans.append(replace(one.span, first_row=first, rows=rows, tree=None, guessed=False))
        if not places:
            return
        batch, context = self._batch(spans, torch.tensor(places)), self._context_rows(places)
        for layer in self._layers:
            layer.attention.remember(context, batch)

    @torch.inference_mode()
    def guess(self, asked: Sequence[Asked]) -> list[Guessed]:
        """Return what is likeliest at the places after the last token of each sequence.

        More guesses than the block has places ask for a tree: then each place has several tokens.
        """
        spans = []
        tokens: list[int] = []
        wanted: list[int] = []  # rows of all blocks that get logits
        for one in asked:
            rows = min(self._config.block, self._settings.context - one.start)
            wanted += range(len(tokens) + 1, len(tokens) + min(rows, 1 + one.most))
            pages = pages_ahead(one, self._settings.pages + one.state_slot)
            spans.append(Span(len(tokens), rows, one.start, pages, one.state_slot))
            tokens += [one.token, *[self._config.mask_token] * (rows - 1)]
        rows_wanted = self._run(spans, torch.tensor(tokens))[wanted]
        trees = [one.most >= self._config.block for one in asked]
        found = self._score(rows_wanted, CANDIDATES if any(trees) else 1)
        guesses = []
        for span, one, tree in zip(spans, asked, trees, strict=True):
            depths = min(span.rows - 1, one.most)
            own, found = found.first(depths), found.after(depths)
            guesses.append(Guessed(own.tokens, own.logprobs) if tree else own.chain())
        return guesses

    def _run(self, spans: Sequence[Span], tokens: torch.Tensor) -> torch.Tensor:
        """Return the outputs of blocks of tokens, normed."""
        causal = self._batch(spans, tokens)
        whole = replace(causal, spans=tuple(map(_whole_block, spans)), _shared={})
        x = self._target.embed(tokens)
        for layer in self._layers:
            x = layer.block(x, causal if layer.causal else whole)
        return self._norm(x)

    def _score(self, hidden: torch.Tensor, candidates: int) -> "_Best":
        """Return the likeliest tokens of each row, with their log probabilities if several."""
        most, rows = self._target.logits_rows, len(hidden)
        tokens = torch.empty(rows, candidates, dtype=torch.int64)
        logprobs = torch.zeros(rows, candidates)
        for first in range(0, rows, most):
            part = slice(first, min(first + most, rows))
            logits = self._target.score(hidden[part])
            if candidates == 1:
                tokens[part, 0] = logits.argmax(dim=1)
            else:
                best = logits.log_softmax(dim=1).topk(candidates, dim=1)
                tokens[part], logprobs[part] = best.indices, best.values
        return _Best(tokens, logprobs)

    def _context_rows(self, places: Sequence[int]) -> torch.Tensor:
        """Return the projected features of some rows of the last step."""
        rows = max(places) + 1
        found = self._context[:rows]
        for first in range(0, rows, LEARNED_ROWS):
            count = min(LEARNED_ROWS, rows - first)
            features = self._target.features(first, count).flatten(1)
            found[first : first + count] = self._feature_norm(self._project(features))
        return found if len(places) == rows else found[places]

    def _batch(self, spans: Sequence[Span], tokens: torch.Tensor) -> Batch:
        """Return a batch of spans without trees, whose rows lie one after another."""
        size = self._settings.page_size
        positions = [torch.arange(span.start, span.start + span.rows) for span in spans]
        kv_slots = [
            span.pages[rows // size] * size + rows % size
            for span, rows in zip(spans, positions, strict=True)
        ]
        return Batch(
            tokens=tokens,
            positions=torch.cat(positions),
            kv_slots=torch.cat(kv_slots),
            spans=tuple(spans),
            output_rows=torch.empty(0, dtype=torch.int64),
        )


def _whole_block(span: Span) -> Span:
    """Return a span of which each row sees all rows."""
    return replace(span, tree=torch.ones(span.rows, span.rows, dtype=torch.bool))


class _Best(NamedTuple):
    """The likeliest tokens of some rows, and their log probabilities: `[rows, candidates]` each."""

    tokens: torch.Tensor
    logprobs: torch.Tensor

    def first(self, rows: int) -> "_Best":
        return _Best(self.tokens[:rows], self.logprobs[:rows])

    def after(self, rows: int) -> "_Best":
        return _Best(self.tokens[rows:], self.logprobs[rows:])

    def chain(self) -> Guessed:
        return Guessed(self.tokens[:, :1], None)


class _DraftLayer:
    """One layer of a draft, and its cache."""

    def __init__(
        self,
        layer: LayerConfig,
        causal: bool,
        config: DraftConfig,
        get: WeightSource,
        settings: PlanSettings,
    ) -> None:
        mixer, ffn = layer.mixer, layer.ffn
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(ffn, FfnConfig)
        self.causal = causal
        self.pages = allocate_kv(mixer, settings, get.case.torch_device, drafts=True)
        if mixer.window and not causal:
            # The rows of a block that is not causal all count as its last one. The window begins
            # where that of the block's first row does.
            mixer = replace(mixer, window=mixer.window + config.block - 1)
        self.attention = Attention(mixer, config.norm_eps, get, self.pages)
        self.block = PreNormBlock(
            mixer_norm=RmsNorm(get.norm("attn.norm"), config.norm_eps, get.case),
            mixer=self.attention,
            ffn_norm=RmsNorm(get.norm("ffn.norm"), config.norm_eps, get.case),
            ffn=Mlp(get, ffn.activation),
        )
