"""Shadows count what each policy would hit, and the best one decides."""

from collections.abc import Iterator

import pytest
import torch

from headroom.experts import cache, policies
from headroom.experts.cache import POLICIES, RULES, CacheModel, Policy
from headroom.experts.policies import (
    FILLS_COST,
    MIN_GAIN,
    MIN_STEPS,
    READ_EVERY_S,
    PolicyKeeper,
    better_policy,
)
from headroom.experts.store import ExpertStore
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import COUNTERS
from headroom.kernels.ops import Picks
from tests.experts.stores import blob_layout, check_cached_layer, small_store
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
EXPERTS, SLOTS = 12, 4


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    with stand_in_gpu(monkeypatch) as made:
        yield made


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cached_store() -> ExpertStore:
    """Two layers with a cache, between them one without experts."""
    layouts = [blob_layout(EXPERTS), None, blob_layout(EXPERTS)]
    hot = [tuple(range(SLOTS)), (), tuple(range(SLOTS))]
    return small_store(layouts, hot, "cuda:0", cold="gpu", pin=True, keep_copy=True, policy="auto")


def test_a_named_policy_that_only_some_layers_can_have_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layouts = [blob_layout(EXPERTS)] * 3
    store = small_store(
        *(layouts, [(1,), (), (0, 2)], "cuda:0"), cold="gpu", pin=True, keep_copy=True, policy="lru"
    )
    assert [layer is not None and layer.is_cached for layer in store.layers] == [True, False, True]
    assert "--expert-policy lru has no effect in 1 of 3 layers with cold experts" in caplog.text


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_experts_keep_their_slots_in_steps_and_in_shadows(policy: Policy) -> None:
    placed, pinned = (0, 3, 5, 7), (3, 7)
    store = small_store(
        *([blob_layout(EXPERTS)], [placed], "cuda:0"),
        cold="gpu",
        pin=True,
        keep_copy=True,
        policy="auto",
        pinned=(pinned,),
    )
    keeper = PolicyKeeper(store, "counts", store.spare.copies.mark)
    (layer,) = store.layers
    assert layer is not None
    for _ in range(2):
        store.restore()
        keeper.restart()
        layer.set_policy(POLICIES.index(policy))
        models = [CacheModel.start(each, EXPERTS, placed, pinned) for each in POLICIES]
        for turn in range(40):
            picks = [[(5 * turn) % 11, 11], [turn % 3, 7 * turn % 12]]
            ids = torch.tensor(picks, dtype=torch.int32).to("cuda")
            weights = torch.ones(2, 2).to("cuda")
            expert_cache.resolve(Picks(ids, weights), layer.lookup, RULES, None)
            assert layer.lookup.filling is not None
            expert_cache.fill(layer.lookup.filling)
            keeper._tables.shape[:, 2] = 2  # picks of a row
            keeper.end_step(2)
            for model in models:
                model.resolve(picks)
        assert set(pinned) <= set(check_cached_layer(store, 0))
        said = [[getattr(model.counts, name) for name in COUNTERS] for model in models]
        assert keeper._tables.counts[0].cpu().tolist() == said
        assert store.cache_counts[0].cpu().tolist() == said[POLICIES.index(policy)]


def run(keeper: PolicyKeeper, store: ExpertStore, picks: list[int]) -> None:
    """Let steps of one row pick these experts in both layers."""
    for expert in picks:
        store.seen[:, :1] = expert
        keeper.end_step(1)


def rates(policy: Policy, picks: list[int]) -> float:
    """The hit rate that the model of a cache has."""
    model = CacheModel.start(policy, EXPERTS, range(SLOTS))
    for expert in picks:
        model.resolve([[expert]])
    return model.counts.hits / model.counts.picks


def read(keeper: PolicyKeeper, clock: Clock) -> None:
    """Let a reading begin and arrive."""
    clock.now += READ_EVERY_S
    keeper.follow()
    torch.cuda.synchronize()
    keeper.follow()


@pytest.mark.parametrize(
    ("current", "rates", "best"),
    [
        ("counts", {"static": 0.5, "lru": 0.62, "spare": 0.55, "counts": 0.6}, "lru"),
        ("counts", {"static": 0.5, "lru": 0.605, "spare": 0.55, "counts": 0.6}, "counts"),
        ("counts", {"static": 0.9, "lru": 0.6, "spare": 0.55, "counts": 0.6}, "static"),
        # Filling slots costs time, so that equal rates speak for leaving them as they are.
        ("counts", {"static": 0.6, "lru": 0.6, "spare": 0.6, "counts": 0.605}, "static"),
        ("static", {"static": 0.6, "lru": 0.62, "spare": 0.6, "counts": 0.625}, "static"),
        ("static", {"static": 0.6, "lru": 0.6, "spare": 0.6, "counts": 0.635}, "counts"),
    ],
)
def test_a_policy_must_be_clearly_better_to_take_over(
    current: Policy, rates: dict[Policy, float], best: Policy
) -> None:
    assert better_policy(current, rates) == best
    gap = MIN_GAIN + FILLS_COST
    assert better_policy("static", {"static": 0.5, "lru": 0.5 + gap + 1e-6}) == "lru"
    assert better_policy("static", {"static": 0.5, "lru": 0.5 + gap - 1e-6}) == "static"


def test_the_policy_that_would_have_hit_most_decides_in_every_layer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = cached_store(), Clock()
    layers = [layer for layer in store.layers if layer is not None]
    keeper = PolicyKeeper(store, "counts", store.spare.copies.mark, clock)
    assert [int(layer.lookup.state[0]) for layer in layers] == [POLICIES.index("counts")] * 2  # type: ignore[index]
    read(keeper, clock)  # what warm-up steps left
    # Four experts in turn, then four others: recency knows at once, counts learn it slowly.
    picks = [4 + turn % 4 + 4 * (turn // 40 % 2) for turn in range(MIN_STEPS + 40)]
    run(keeper, store, picks[: MIN_STEPS // 2])
    read(keeper, clock)
    assert keeper.now.hit_rates == {}  # too few steps for a comparison
    run(keeper, store, picks[MIN_STEPS // 2 :])
    with caplog.at_level("INFO"):
        read(keeper, clock)
    wanted = {policy: rates(policy, picks) for policy in POLICIES}
    assert keeper.now.hit_rates == pytest.approx(wanted)
    best = better_policy("counts", wanted)
    assert best != "counts"
    assert keeper.now.policy == best
    assert [int(layer.lookup.state[0]) for layer in layers] == [POLICIES.index(best)] * 2  # type: ignore[index]
    assert caplog.messages == [
        f"experts: slots change hands by {best} from now on, which would have hit "
        f"{100 * wanted[best]:.1f} % of the last choices, and counts {100 * wanted['counts']:.1f} %"
    ]


def test_following_waits_for_no_copy(gpu: StandInGpu) -> None:
    store, clock = cached_store(), Clock()
    keeper = PolicyKeeper(store, "counts", store.spare.copies.mark, clock)
    clock.now = READ_EVERY_S
    keeper.follow()
    keeper.follow()  # the copy has not run yet
    assert keeper._before is None
    torch.cuda.synchronize()
    keeper.follow()
    assert keeper._before is not None


def test_static_brings_the_experts_of_the_placement_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = cached_store(), Clock()
    layers = [layer for layer in store.layers if layer is not None]
    for layer in layers:
        layer.cold.random_(0, 255)
        layer.hold(layer.hot, copy_all=True)
    keeper = PolicyKeeper(store, "lru", store.spare.copies.mark, clock)
    read(keeper, clock)
    for layer in layers:
        layer.hold((0, 5, 6, 11))  # what recency has put into the slots
    run(keeper, store, [turn % SLOTS for turn in range(MIN_STEPS)])
    monkeypatch.setattr(policies, "RESTORED_BYTES", 1)  # a layer between two steps
    read(keeper, clock)
    assert keeper.now.policy == "static"
    assert [layer.hot for layer in layers] == [(0, 5, 6, 11)] * 2
    for restored in (1, 2):
        keeper.follow()
        torch.cuda.synchronize()
        store.take_places()
        assert [layer.hot == (0, 1, 2, 3) for layer in layers] == [True, restored == 2]
    for layer in layers:
        for expert in layer.hot:
            slot, row = layer.slot_of(expert), layer.cold_of(expert)
            assert slot is not None
            assert row is not None
            assert torch.equal(slot.cpu(), row)


def test_a_policy_that_takes_over_meanwhile_keeps_what_is_in_slots() -> None:
    store, clock = cached_store(), Clock()
    keeper = PolicyKeeper(store, "lru", store.spare.copies.mark, clock)
    read(keeper, clock)
    run(keeper, store, [turn % SLOTS for turn in range(MIN_STEPS)])
    read(keeper, clock)
    assert keeper.now.policy == "static"
    assert len(keeper._restores) == 2
    run(keeper, store, [4 + turn % SLOTS for turn in range(MIN_STEPS)])
    keeper._restores.rotate()  # none of them has its turn
    keeper._compare(keeper._tables.counts.sum(0).cpu() - keeper._before)
    assert keeper.now.policy != "static"
    assert not keeper._restores
