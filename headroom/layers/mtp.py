"""MtpHead: the layer of a model that predicts further ahead than the next token (MTP).

The layer reads, for each token, its embedding and the model's hidden state after the token before
it, and predicts the token that follows. It stands behind the model's own layers, has a cache like
one of full attention, and shares the model's embedding and vocabulary. Its own output takes the
place of the hidden state where the model has not computed one: so it guesses token after token.
"""

from collections.abc import Callable, Sequence

import torch

from headroom.errors import CapacityError
from headroom.kernels.ops import Span
from headroom.layers.attention import Attention
from headroom.layers.batch import Batch
from headroom.layers.block import Ffn, PreNormBlock
from headroom.layers.cache import KvPages
from headroom.layers.draft_network import Asked, Guessed, pages_ahead
from headroom.layers.guesses import Accepted
from headroom.layers.modules import Embedding, Head, Linear, RmsNorm
from headroom.layers.weights import WeightSource
from headroom.plan.settings import PlanSettings


class HiddenStates:
    """The hidden state after each sequence's last token, and those of the last guessed rows."""

    def __init__(self, settings: PlanSettings, hidden: int, device: str) -> None:
        self.last = torch.empty(settings.parallel, hidden, device=device)  # by state slot
        self._rows = torch.empty(settings.verify_rows, hidden, device=device)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self.last.nbytes + self._rows.nbytes

    def before(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Return, for each row of a step, the hidden state after the token that it follows.

        Nothing comes before the first token of a text: its row gets zeros.
        """
        before = torch.empty_like(hidden)
        before[1:] = hidden[:-1]
        for span in spans:
            own = before[span.first_row : span.first_row + span.rows]
            known = self.last[span.state_slot] if span.start else torch.zeros_like(own[0])
            if span.tree is None:
                own[0] = known
                continue
            for row, parent in enumerate(span.parents()):
                own[row] = known if parent < 0 else hidden[span.first_row + parent]
        return before

    def keep(self, hidden: torch.Tensor, batch: Batch) -> None:
        """Keep the states after the last tokens, and those of guessed rows until one is chosen."""
        for span in batch.spans:
            if not span.guessed:
                self.last[span.state_slot] = hidden[span.first_row + span.rows - 1]
        if not batch.guessed:
            return
        if len(hidden) > len(self._rows):
            raise CapacityError(
                f"A step with guesses has {len(hidden)} rows, and memory was planned for "
                f"{len(self._rows)}.",
                hint="Guess fewer tokens at a time.",
            )
        self._rows[: len(hidden)] = hidden

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Take the state of the last accepted row of each guessed span."""
        for one in accepted:
            self.last[one.span.state_slot] = self._rows[one.span.first_row + one.rows[-1]]


class MtpHead:
    """Guesses chains of tokens; a `DraftNetwork`.

    Row s of its cache comes from token s and the hidden state after token s - 1, so that it depends
    on no later token, and pages of prefixes can be shared as those of other layers.
    """

    def __init__(
        self,
        get: WeightSource,  # of the layer
        eps: float,
        *,
        embedding: Embedding,
        final_norm: RmsNorm,  # the model's, which gives its hidden states
        head: Head,  # the layer's norm, with the model's vocabulary
        attention: Attention,
        ffn: Ffn,
        pages: KvPages,  # one more than the engine lends for each state slot, at the end
        states: HiddenStates,
        logits_for: Callable[[int], torch.Tensor],  # memory for the logits of some rows
    ) -> None:
        self._embed_norm = RmsNorm(get.norm("mtp.embed_norm"), eps, get.case)
        self._hidden_norm = RmsNorm(get.norm("mtp.hidden_norm"), eps, get.case)
        self._proj = Linear(get("mtp.proj"), get.case)
        self._attn_norm = RmsNorm(get.norm("attn.norm"), eps, get.case)
        ffn_norm = RmsNorm(get.norm("ffn.norm"), eps, get.case)
        self._attention = attention
        self._block = PreNormBlock(self._attn_norm, attention, ffn_norm, ffn)
        self._embedding, self._final_norm, self._head = embedding, final_norm, head
        self._states, self._logits_for = states, logits_for
        self._page_size = pages.kv.page_size
        all_pages = len(pages.kv.keys) // self._page_size
        self._first_own_page = all_pages - len(states.last)

    @torch.inference_mode()
    def learn(self, stream: torch.Tensor, batch: Batch) -> None:
        """Cache the keys and values of a step's rows, and keep their hidden states."""
        hidden = self._final_norm(stream)
        x = self._input(batch.tokens, self._states.before(hidden, batch.spans))
        self._attention.remember(self._attn_norm(x), batch)
        self._states.keep(hidden, batch)

    @torch.inference_mode()
    def guess(self, asked: Sequence[Asked]) -> list[Guessed]:
        """Return a chain for each sequence, by one row of each for every token ahead."""
        # The longest chains first: those that end leave the rows of a step at its end.
        order = sorted(range(len(asked)), key=lambda at: -asked[at].most)
        chains: list[list[int]] = [[] for _ in asked]
        tokens = torch.tensor([asked[at].token for at in order])
        hidden = self._states.last[[asked[at].state_slot for at in order]]
        for ahead in range(asked[order[0]].most):
            rows = [asked[at] for at in order if asked[at].most > ahead]
            batch = self._batch(rows, ahead, tokens[: len(rows)])
            hidden, logits = self.predict(batch, hidden[: len(rows)])
            tokens = logits.argmax(-1)
            for at, token in zip(order, tokens.tolist(), strict=False):
                chains[at].append(token)
        return [Guessed(torch.tensor(chain)[:, None], None) for chain in chains]

    def predict(self, batch: Batch, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states and the logits after some rows, and cache keys and values.

        `before` has the hidden state after the token that each row follows. The logits are valid
        until the next call.
        """
        x = self._block(self._input(batch.tokens, before), batch)
        hidden = self._head.norm(x)
        return hidden, self._head.product(hidden, self._logits_for(len(hidden)))

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Keep the hidden states of accepted rows; their keys and values lie in pages."""
        self._states.commit(accepted)

    def _input(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the rows that the layer's attention reads, before its norm."""
        embedded = self._embedding(tokens, torch.empty_like(before))
        both = (self._embed_norm(embedded), self._hidden_norm(before))
        return self._proj(torch.cat(both, dim=1))

    def _batch(self, asked: Sequence[Asked], ahead: int, tokens: torch.Tensor) -> Batch:
        """Return a step of one row for each sequence, so many tokens after its last one."""
        spans, kv_slots, size = [], [], self._page_size
        for row, one in enumerate(asked):
            pages, at = pages_ahead(one, self._first_own_page + one.state_slot), one.start + ahead
            spans.append(Span(row, 1, at, pages, one.state_slot))
            kv_slots.append(int(pages[at // size]) * size + at % size)
        return Batch(
            tokens=tokens,
            positions=torch.tensor([span.start for span in spans]),
            kv_slots=torch.tensor(kv_slots),
            spans=tuple(spans),
            output_rows=torch.arange(len(spans)),
        )
