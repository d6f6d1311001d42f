"""DFlash drafts: their arithmetic with caches, against the whole computation in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.families.files import open_checkpoint
from headroom.layers.batch import Batch, Span
from headroom.layers.dflash import DFlashNetwork, Target
from headroom.layers.draft_network import Asked
from headroom.layers.guesses import Accepted
from headroom.layers.weights import open_weights
from headroom.plan.drafts import describe_draft
from headroom.plan.settings import PlanSettings
from tests.dflash_drafts import YARN, RandomDraft, block_outputs, random_draft, target_shape

VOCAB, PAGES, PARALLEL, CONTEXT = 320, 16, 3, 256
DRAFTS: dict[str, dict[str, Any]] = {
    "windows": {},
    "all full": {"layer_types": ["full_attention"] * 3, "use_sliding_window": False},
    "YaRN": {"rope_scaling": YARN},
    "causal": {"is_causal": True},
    "not causal": {"is_causal": False},
}
CAUSAL = {"causal": True, "not causal": False}


class Bench:
    """A draft on the CPU, with a target that embeds and scores by random tables."""

    def __init__(self, draft: RandomDraft, folder: Path, *, reference: bool = False) -> None:
        source = torch.Generator().manual_seed(5)
        hidden = draft.config["hidden_size"]
        self.draft = draft
        self.table = torch.randn(VOCAB, hidden, generator=source)
        self.head = torch.randn(VOCAB, hidden, generator=source)
        self.features = torch.randn(0, 3, hidden)  # of the last step
        self.settings = PlanSettings(
            context=CONTEXT, parallel=PARALLEL, chunk=CONTEXT, cache_tokens=PAGES * 64,
            k_type="f32", v_type="f32", compute_type="f32", weights="packed", threads=1,
            kernels="reference" if reference else "native",
        )  # fmt: skip
        checkpoint = open_checkpoint(draft.save(folder))
        self.config = describe_draft(checkpoint, target_shape(hidden, VOCAB)).config
        weights = open_weights(checkpoint.tensors, "cpu", self.settings, lambda line, size: None)
        target = Target(
            embed=lambda tokens: self.table[tokens],
            score=lambda rows: rows @ self.head.T,
            logits_rows=5,
            features=lambda first, count: self.features[first : first + count],
        )
        self.network = DFlashNetwork(self.config, weights, self.settings, target)

    def learn(self, features: torch.Tensor, spans: list[Span]) -> None:
        """Let the network learn a step that had these features."""
        self.features = features
        rows = torch.zeros(len(features), dtype=torch.int64)
        batch = Batch(rows, rows, rows, tuple(spans), rows[:0])  # the spans say everything
        self.network.learn(torch.empty(0), batch)

    def outputs(self, asked: list[Asked]) -> list[torch.Tensor]:
        """Return the outputs of the blocks that guess."""
        found: list[torch.Tensor] = []
        run = self.network._run

        def record(spans: list[Span], tokens: torch.Tensor) -> torch.Tensor:
            hidden = run(spans, tokens)
            found.extend(hidden.split([span.rows for span in spans]))
            return hidden

        self.network._run = record  # type: ignore[method-assign,assignment]
        self.network.guess(asked)
        self.network._run = run  # type: ignore[method-assign]
        return found

    def wanted(self, features: torch.Tensor, token: int, causal: bool | None) -> torch.Tensor:
        """Return the outputs of a block after tokens with these features."""
        rows = min(self.config.block, CONTEXT - len(features))
        tokens = torch.tensor([token, *[self.config.mask_token] * (rows - 1)])
        return block_outputs(self.draft, features, self.table[tokens], causal)


def some_features(rows: int, hidden: int = 64, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, 3, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_blocks_after_features_in_uneven_steps_are_those_of_the_whole_computation(
    name: str, reference: bool, tmp_path: Path
) -> None:
    draft = random_draft(**DRAFTS[name])
    bench, features = Bench(draft, tmp_path, reference=reference), some_features(190)
    pages, start = torch.tensor([9, 2, 11]), 0
    for rows in (1, 30, 2, 32, 61, 3, 32, 29):
        span = Span(0, rows, start, pages[: (start + rows - 1) // 64 + 1], state_slot=2)
        bench.learn(features[start : start + rows], [span])
        start += rows
        # Guesses leave nothing behind that later guesses see.
        asked = Asked(5, start, pages[: start // 64 + 1], 2, 7)
        found = bench.outputs([asked])[0]
        wanted = bench.wanted(features[:start], 5, CAUSAL.get(name))
        assert found.shape == (8, 64)
        assert (found - wanted).abs().max() < 1e-4, start


def test_sequences_of_a_step_do_not_see_each_other(tmp_path: Path) -> None:
    bench = Bench(random_draft(), tmp_path)
    known = [some_features(20, seed=1), some_features(33, seed=2), some_features(70, seed=4)]
    pages = [torch.tensor(x) for x in ([3], [1], [0, 7])]
    spans, first = [], 0
    for slot, (rows, own) in enumerate(zip(known, pages, strict=True)):
        spans.append(Span(first, len(rows), 0, own, slot))
        first += len(rows)
    bench.learn(torch.cat(known), spans)
    asked = [Asked(slot, len(known[slot]), pages[slot], slot, 7) for slot in range(3)]
    for slot, found in enumerate(bench.outputs(asked)):
        assert (found - bench.wanted(known[slot], slot, None)).abs().max() < 1e-4


def test_only_the_accepted_rows_of_a_tree_are_learned(tmp_path: Path) -> None:
    bench, pages = Bench(random_draft(), tmp_path), torch.tensor([4, 6])
    features = some_features(62)
    bench.learn(features, [Span(0, 62, 0, pages[:1])])
    step = some_features(9, seed=8)
    other = Span(0, 1, 0, torch.tensor([2]), state_slot=1)
    guessed = Span(1, 8, 62, pages, tree=torch.eye(8, dtype=torch.bool), guessed=True)
    bench.learn(step, [other, guessed])
    bench.network.commit([Accepted(guessed, (0, 3, 4, 7))])
    for own, slot, rows in (
        (pages, 0, torch.cat((features, step[[1, 4, 5, 8]]))),
        (other.pages, 1, step[:1]),
    ):
        found = bench.outputs([Asked(9, len(rows), own, slot, 7)])[0]
        assert (found - bench.wanted(rows, 9, None)).abs().max() < 1e-4


def test_guesses_are_the_likeliest_tokens_of_their_places(tmp_path: Path) -> None:
    bench, pages = Bench(random_draft(), tmp_path), torch.tensor([4])
    features = some_features(40)
    bench.learn(features, [Span(0, 40, 0, pages), Span(0, 40, 0, pages + 1, state_slot=1)])
    wanted = (bench.wanted(features, 5, None) @ bench.head.double().T)[1:].log_softmax(-1)
    chain, tree = bench.network.guess([Asked(5, 40, pages, 0, 3), Asked(5, 40, pages + 1, 1, 22)])
    assert chain.tokens.tolist() == wanted[:3].argmax(-1, keepdim=True).tolist()
    best = wanted.topk(8)
    assert chain.logprobs is None
    assert tree.logprobs is not None
    assert tree.tokens.tolist() == best.indices.tolist()
    assert (tree.logprobs - best.values).abs().max() < 1e-4


def test_a_block_is_shorter_at_the_end_of_the_context(tmp_path: Path) -> None:
    bench, pages = Bench(random_draft(), tmp_path), torch.tensor([4, 5, 6, 7])
    features = some_features(CONTEXT - 3)
    bench.learn(features, [Span(0, len(features), 0, pages)])
    asked = Asked(5, len(features), pages, 0, 7)
    found = bench.outputs([asked])[0]
    assert (found - bench.wanted(features, 5, None)).abs().max() < 1e-4
    assert len(bench.network.guess([asked])[0].tokens) == 2
