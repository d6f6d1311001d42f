"""Exchanges move only what pays, lose no expert and hold none twice; a failure ends a round."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import KernelError
from headroom.experts.exchange import (
    Exchange,
    ExchangePolicy,
    ExchangeRound,
    plan_exchanges,
    recent,
)
from headroom.experts.placement import ExpertPlacement, LayerExperts, place_experts
from tests.experts.stores import (
    NotedExchanges,
    blob_layout,
    check_layer,
    placement_after,
    small_store,
)
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.streams import StandInError

Problem = tuple[list[LayerExperts], list[list[int]], ExpertPlacement, ExchangePolicy]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layers, a placement of part of their experts, counts and a policy."""
    layers, counts, hot = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        experts = draw(st.integers(0, 8))
        layers.append(LayerExperts(experts, draw(st.integers(1, 40))))
        counts.append(draw(st.lists(st.integers(0, 30), min_size=experts, max_size=experts)))
        resident = draw(st.sets(st.sampled_from(range(experts)))) if experts else set()
        hot.append(tuple(sorted(resident)))
    policy = ExchangePolicy(
        min_gain=draw(st.integers(1, 5)),
        hysteresis=draw(st.sampled_from([0.0, 0.25, 1.0])),
        false_chance=draw(st.sampled_from([1.0, 0.5, 0.001])),
        per_layer=draw(st.integers(0, 3)),
        most_bytes=draw(st.none() | st.integers(0, 200)),
    )
    return layers, counts, ExpertPlacement(tuple(hot), "even"), policy


@given(problems())
def test_exchanges_lose_no_expert_and_keep_every_limit(problem: Problem) -> None:
    layers, counts, placement, policy = problem
    exchanges = plan_exchanges(placement, counts, layers, policy)
    after = placement_after(placement, exchanges)
    assert [len(ids) for ids in after.hot] == [len(ids) for ids in placement.hot]
    assert after.hot_bytes(layers) == placement.hot_bytes(layers)
    for exchange in exchanges:
        assert exchange.demoted in placement.hot[exchange.layer]
        assert exchange.promoted not in placement.hot[exchange.layer]
        gain = counts[exchange.layer][exchange.promoted] - counts[exchange.layer][exchange.demoted]
        assert gain == exchange.gain >= policy.min_gain
        assert gain > policy.hysteresis * counts[exchange.layer][exchange.demoted]
    moved = [(one.layer, x) for one in exchanges for x in (one.promoted, one.demoted)]
    assert len(set(moved)) == len(moved)
    for index in range(len(layers)):
        assert sum(exchange.layer == index for exchange in exchanges) <= policy.per_layer
    assert policy.most_bytes is None or sum(x.copied_bytes for x in exchanges) <= policy.most_bytes


@pytest.mark.parametrize(("promoted", "gains"), [(4.9, False), (5.0, False), (5.1, True)])
def test_a_gain_must_exceed_the_hysteresis(promoted: float, gains: bool) -> None:
    found = plan_exchanges(
        ExpertPlacement(((0,),), "even"),
        [[4.0, promoted]],
        [LayerExperts(2, 1)],
        ExchangePolicy(min_gain=0.5, hysteresis=0.25, false_chance=1),
    )
    assert bool(found) == gains


@pytest.mark.parametrize(("promoted", "gains"), [(1.9, False), (2.0, True)])
def test_a_gain_may_be_just_the_least_one(promoted: float, gains: bool) -> None:
    found = plan_exchanges(
        ExpertPlacement(((0,),), "even"),
        [[0.0, promoted]],
        [LayerExperts(2, 1)],
        ExchangePolicy(min_gain=2.0, false_chance=1),
    )
    assert bool(found) == gains


@given(problems())
def test_rounds_come_to_rest_with_the_best_experts_hot(problem: Problem) -> None:
    layers, counts, placement, _ = problem
    policy = ExchangePolicy(min_gain=1, hysteresis=0, false_chance=1)
    for _ in range(64):
        exchanges = plan_exchanges(placement, counts, layers, policy)
        placement = placement_after(placement, exchanges)
    assert plan_exchanges(placement, counts, layers, policy) == []
    for ids, row in zip(placement.hot, counts, strict=True):
        best = sorted(row, reverse=True)[: len(ids)]
        assert sorted((row[expert] for expert in ids), reverse=True) == best


def test_the_largest_gains_come_first() -> None:
    layers = [LayerExperts(3, 10)] * 3
    placement = ExpertPlacement(((0,), (0,), (0,)), "even")
    counts = [[1, 5, 0], [1, 9, 0], [1, 5, 0]]
    policy = ExchangePolicy(most_bytes=60, false_chance=1)
    exchanges = plan_exchanges(placement, counts, layers, policy)
    found = [(one.layer, one.promoted, one.gain) for one in exchanges]
    assert found == [(1, 1, 8), (0, 1, 4)]


def test_what_is_too_large_leaves_room_to_a_smaller_exchange() -> None:
    layers = [LayerExperts(2, 20), LayerExperts(2, 10)]
    placement = ExpertPlacement(((0,), (0,)), "even")
    policy = ExchangePolicy(most_bytes=59, false_chance=1)
    exchanges = plan_exchanges(placement, [[1, 9], [1, 5]], layers, policy)
    assert [(exchange.layer, exchange.copied_bytes) for exchange in exchanges] == [(1, 30)]


def test_experts_chosen_equally_often_do_not_change_places() -> None:
    layers = [LayerExperts(2, 10)]
    placement = place_experts(layers, [[101, 100]], 10, 1)
    policy = ExchangePolicy(false_chance=1)
    assert plan_exchanges(placement, [[100, 102]], layers, policy) == []
    assert len(plan_exchanges(placement, [[100, 126]], layers, policy)) == 1


def test_recent_counts_are_worth_so_many_tokens_at_most() -> None:
    scaled = recent([[30.0, 10.0], [1.0, 2.0], []], used=(2, 2, 0), tokens=10)
    assert scaled == ((15.0, 5.0), (1.0, 2.0), ())  # 20 choices are 10 tokens; few stay as they are


COUNTS = [[0, 0, 9, 8], [7, 9, 0, 0]]
# The copies of an exchange, by their number: two to the spare buffers, a table, two to the new
# places, and a table again.
COPIES = 6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU whose copies run when somebody waits for them, or when a test lets them."""
    with stand_in_gpu(monkeypatch) as made:
        made.queues.stepped = True
        yield made


@pytest.fixture
def experts(gpu: StandInGpu) -> Iterator[NotedExchanges]:
    """Two layers whose experts are half hot."""
    layouts = [blob_layout(4), blob_layout(4)]
    store = small_store(list(layouts), [(0, 1), (2, 3)], "cuda:0", pin=True, cold="gpu")
    gpu.queues.finish()
    gpu.queues.asked = 0
    yield NotedExchanges(store, [LayerExperts(4, 1)] * 2)
    gpu.queues.finish()
    for index in range(2):  # whatever happened, every expert is whole and where tables say
        check_layer(store, index)


def plan(experts: NotedExchanges) -> list[Exchange]:
    return plan_exchanges(
        experts.placement(), COUNTS, experts.layers(), ExchangePolicy(per_layer=2, false_chance=1)
    )


def run(exchanges: ExchangeRound) -> None:
    """Carry out a round to its end, as an engine that rests does."""
    while not exchanges.over:
        if exchanges.turned:
            exchanges.end()
        else:
            exchanges.turn()


def test_all_exchanges_are_done_in_the_order_that_was_planned(experts: NotedExchanges) -> None:
    planned = plan(experts)
    expected = placement_after(experts.placement(), planned)
    exchanges = ExchangeRound(experts, planned)
    run(exchanges)
    assert (exchanges.done, exchanges.error) == (planned, None)
    assert experts.exchanged == [(x.layer, x.promoted, x.demoted) for x in planned]
    assert experts.placement().hot == expected.hot == ((2, 3), (0, 1))


def test_experts_change_sides_at_turn_and_not_before(
    experts: NotedExchanges, gpu: StandInGpu
) -> None:
    exchanges = ExchangeRound(experts, plan(experts)[:1])
    assert not exchanges.ready()
    gpu.queues.finish()
    assert exchanges.ready()
    assert experts.placement().hot == ((0, 1), (2, 3))
    assert exchanges.turn() is not None
    assert experts.placement().hot != ((0, 1), (2, 3))
    assert (exchanges.done, exchanges.over) == ([], False)
    assert not exchanges.ready()
    gpu.queues.finish()
    assert exchanges.ready()
    exchanges.end()
    assert (len(exchanges.done), exchanges.over) == (1, True)
    assert experts.waits == 0


def test_a_round_without_exchanges_is_over(experts: NotedExchanges) -> None:
    assert ExchangeRound(experts, []).over


@pytest.mark.parametrize(
    ("where", "kind", "copy"),
    [
        ("begin", "refused_at", 1),
        ("ready", "failed_at", 1),
        ("turn", "refused_at", 3),
        ("move", "refused_at", 4),
        ("end", "failed_at", 4),
    ],
)
def test_a_failure_ends_the_round_and_keeps_the_exchanges_before_it(
    experts: NotedExchanges, gpu: StandInGpu, where: str, kind: str, copy: int
) -> None:
    setattr(gpu.queues, kind, COPIES + copy)  # of the second exchange
    before, planned = experts.placement(), plan(experts)
    exchanges = ExchangeRound(experts, planned)
    while not exchanges.over:
        gpu.queues.finish()
        assert exchanges.ready()
        if exchanges.turned:
            exchanges.end()
        else:
            exchanges.turn()
    assert isinstance(exchanges.error, KernelError | StandInError)
    assert len(exchanges.done) == len(experts.exchanged) == 1
    assert len(experts.begun) == (1 if where == "begin" else 2)
    # Where copies to the new places failed, the two have changed sides already.
    turned = planned[: 2 if where in ("move", "end") else 1]
    assert experts.placement().hot == placement_after(before, turned).hot
    gpu.queues.repair()


def test_who_gives_way_forgets_a_exchange_that_has_not_turned(experts: NotedExchanges) -> None:
    before = experts.placement()
    exchanges = ExchangeRound(experts, plan(experts))
    exchanges.give_way()
    assert exchanges.over
    assert experts.placement() == before
    again = ExchangeRound(experts, plan(experts))
    run(again)
    assert len(again.done) == 4


def test_who_gives_way_still_ends_a_exchange_that_has_turned(experts: NotedExchanges) -> None:
    exchanges = ExchangeRound(experts, plan(experts))
    exchanges.turn()
    exchanges.give_way()
    assert not exchanges.over
    exchanges.end()
    assert exchanges.over
    assert len(experts.begun) == len(experts.exchanged) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_round_that_stops_waits_for_its_copies(experts: NotedExchanges, turned: bool) -> None:
    exchanges = ExchangeRound(experts, plan(experts))
    if turned:
        exchanges.turn()
    experts.waits = 0
    exchanges.stop()
    assert exchanges.over
    assert experts.waits == 1
    assert len(experts.exchanged) == turned
    exchanges.stop()  # there is nothing left to wait for
    assert experts.waits == 1


def test_only_layers_with_cold_experts_change() -> None:
    layouts = [None, blob_layout(2), blob_layout(3)]  # dense, all hot, some cold
    store = small_store(layouts, [(), (0, 1), (0,)])
    layers = (LayerExperts(0, 0), LayerExperts(2, 7), LayerExperts(3, 7))
    experts = NotedExchanges(store, layers)
    size = blob_layout(3).nbytes
    assert experts.layers()[2] == LayerExperts(3, size, link_copies=3)  # as the store holds it
    policy = ExchangePolicy(most_bytes=3 * size, false_chance=1)
    planned = plan_exchanges(experts.placement(), [[], [0, 9], [0, 0, 9]], experts.layers(), policy)
    exchanges = ExchangeRound(experts, planned)
    run(exchanges)
    assert (exchanges.error, experts.exchanged) == (None, [(2, 2, 0)])
    assert experts.placement().hot == ((), (0, 1), (2,))
    check_layer(store, 2)
