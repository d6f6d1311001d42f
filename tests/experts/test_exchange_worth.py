"""Exchanges follow skewed routing, not the noise of even routing, and pay for their copies."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from headroom.experts.exchange import (
    Exchange,
    ExchangePolicy,
    needed_errors,
    plan_exchanges,
    recent,
)
from headroom.experts.placement import ExpertPlacement, LayerExperts
from headroom.options import SWAP_WINDOW, Options
from headroom.plan.cost_model import EXCHANGE_HORIZON_TOKENS, ColdSpeeds
from headroom.split.upkeep_rules import upkeep_rules
from tests.experts.stores import placement_after

EXPERTS, USED, LAYERS, HOT = 256, 8, 4, 102  # 40 % hot, as a small card has them
CONVERSATIONS, TURN_TOKENS = 16, 32  # each conversation adds so many tokens between two rounds
SPEEDS = ColdSpeeds(gpu=3e12, link=50e9, cpu=70e9, handover_s=10e-6, copy=55e9)
DEFAULT = upkeep_rules(Options()).policy
CARELESS = replace(DEFAULT, false_chance=1.0)


class Server:
    """Sixteen conversations that choose experts by fixed chances, and rounds of exchanges."""

    def __init__(self, seed: int, skew: float) -> None:
        self._random = np.random.default_rng(seed)
        # The chance of the expert of rank r falls as 1 / (r + 8) ** skew; ranks are shuffled.
        odds = 1.0 / (np.arange(EXPERTS) + 8.0) ** skew
        self.odds = np.stack([self._random.permutation(odds) for _ in range(LAYERS)])
        self.placement = ExpertPlacement((tuple(range(HOT)),) * LAYERS, "even")
        self.tokens = 0
        self._seen: tuple[tuple[float, ...], ...] = ((0.0,) * EXPERTS,) * LAYERS

    def run_round(self, policy: ExchangePolicy) -> list[Exchange]:
        """Route the tokens of all conversations, then plan and make exchanges."""
        rows = CONVERSATIONS * TURN_TOKENS
        self.tokens += rows
        # The largest of log-odds plus Gumbel noise are a draw without replacement by the odds.
        noise = self._random.gumbel(size=(LAYERS, rows, EXPERTS))
        picks = np.argpartition(-(np.log(self.odds)[:, None] + noise), USED, axis=2)[:, :, :USED]
        counts = [np.bincount(layer.ravel(), minlength=EXPERTS) for layer in picks]
        grown = [np.add(old, new).tolist() for old, new in zip(self._seen, counts, strict=True)]
        self._seen = recent(grown, [USED] * LAYERS, SWAP_WINDOW)
        layers = [LayerExperts(EXPERTS, 1_800_000, USED)] * LAYERS
        found = plan_exchanges(self.placement, self._seen, layers, policy, SPEEDS)
        self.placement = placement_after(self.placement, found)
        return found

    def hot_odds(self) -> float:
        """Return the share of all odds that the hot experts have, relative to the best choice."""
        held = sum(
            row[list(hot)].sum() for row, hot in zip(self.odds, self.placement.hot, strict=True)
        )
        best = np.sort(self.odds, axis=1)[:, -HOT:].sum()
        return float(held / best)


@pytest.mark.parametrize("seed", range(4))
def test_even_routing_makes_no_exchange(seed: int) -> None:
    server = Server(seed, skew=0.0)
    assert [server.run_round(DEFAULT) for _ in range(40)] == [[]] * 40
    assert server.tokens == 20480


def test_without_proof_even_routing_would_make_many_exchanges() -> None:
    server = Server(0, skew=0.0)
    assert sum(len(server.run_round(CARELESS)) for _ in range(40)) > 50


@pytest.mark.parametrize("seed", range(2))
def test_skewed_routing_soon_makes_the_right_experts_hot(seed: int) -> None:
    server = Server(seed, skew=1.0)
    assert server.hot_odds() < 0.6
    first_tokens = 0
    for _ in range(100):
        for one in server.run_round(DEFAULT):
            first_tokens = first_tokens or server.tokens
            assert server.odds[one.layer][one.promoted] > server.odds[one.layer][one.demoted]
    assert first_tokens <= 1024
    assert server.hot_odds() > 0.98


def test_the_best_of_many_pairs_must_differ_by_more_standard_errors() -> None:
    assert needed_errors(1, 0.001) == pytest.approx(sqrt(2 * np.log(1000)))
    assert needed_errors(1_000_000, 0.001) == pytest.approx(sqrt(2 * np.log(1e9)))
    assert needed_errors(0, 0.001) == needed_errors(1, 0.001)  # no pair, so nothing is asked
    assert needed_errors(1_000_000, 1.0) == 0.0
    assert needed_errors(1, 0.0) == float("inf")


def test_a_gain_must_exceed_the_standard_errors() -> None:
    placement, layers = ExpertPlacement(((0,),), "even"), [LayerExperts(2, 10)]
    errors = needed_errors(1, 0.001)
    # With 100 and 100 + gain choices the standard error is sqrt(200 + gain).
    least = (errors**2 + sqrt(errors**4 + 800 * errors**2)) / 2
    for gain, wanted in ((least - 0.1, 0), (least + 0.1, 1)):
        found = plan_exchanges(placement, [[100, 100 + gain]], layers, ExchangePolicy())
        assert len(found) == wanted


@pytest.mark.parametrize(("link_copies", "gain"), [(1, 100), (3, 300)])
def test_an_exchange_must_save_more_time_than_its_copies_take(link_copies: int, gain: int) -> None:
    # A cold pick takes as long as a copy, a hot one no time. Of 2048 expected tokens so many more
    # than the copies must choose the expert; the counts are of 100 times as many tokens.
    speeds = ColdSpeeds(gpu=float("inf"), link=4e9, cpu=6e9, handover_s=0.0, copy=10e9)
    layers = [LayerExperts(3, 1000, used=2, link_copies=link_copies)]
    policy = ExchangePolicy(hysteresis=0.0, false_chance=1.0)
    total = 100 * EXCHANGE_HORIZON_TOKENS * 2
    for more, wanted in ((0, 0), (1, 1)):
        counts = [50, 50 + gain + more, total - 100 - gain - more]
        placement = ExpertPlacement(((0, 2),), "even")
        found = plan_exchanges(placement, [counts], layers, policy, speeds)
        assert len(found) == wanted
        assert len(plan_exchanges(placement, [counts], layers, policy)) == 1  # without costs
