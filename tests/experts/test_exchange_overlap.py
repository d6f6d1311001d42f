"""Exchanges whose copies run beside steps: a step finds every expert whole, whatever fails."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headroom.experts import store as stores
from headroom.experts.exchange import Exchange, ExchangeRound, StoreExchanges
from headroom.experts.placement import LayerExperts
from headroom.experts.store import ExpertStore
from tests.experts.late_gpu import CopyError, LateGpu
from tests.experts.pretended import swapped
from tests.experts.stores import blob_layout, check_layer, exchange, small_store
from tests.pinned import pretend_pinning

EXPERTS = (5, 4)
HOT = [(0, 2, 4), (1,)]
LAYERS = [LayerExperts(count, 1) for count in EXPERTS]
# Expert 1 comes and goes again; 3 follows it to the same slot.
SWAPS = [Exchange(0, 1, 2, 1.0, 2), Exchange(1, 3, 1, 1.0, 2), Exchange(0, 3, 1, 1.0, 2)]
COPIES = 4 * len(SWAPS) + 2 * len(SWAPS)  # of experts, and of tables


@pytest.fixture(scope="module", autouse=True)
def pinned() -> Iterator[None]:
    """Memory that is taken for pinned, so that both sides read cold experts in place."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_pinning(patch)
        yield
        gc.collect()  # memory is given back to the driver that lent it


def open_late(keep_copy: bool, gpu: LateGpu) -> tuple[ExpertStore, StoreExchanges]:
    layouts = [blob_layout(count) for count in EXPERTS]
    store = small_store(list(layouts), list(HOT), keep_copy=keep_copy, pin=True, cold="gpu")
    store.spare.copies = gpu
    return store, StoreExchanges(store, LAYERS, same_bits=True)


def tend(swaps: ExchangeRound, gpu: LateGpu) -> None:
    """Do what an engine does between two steps."""
    if swaps.over or not swaps.ready():
        return
    if swaps.turned:
        swaps.end()
    else:
        gpu.land()
        swaps.turn()


def check_all(store: ExpertStore, gpu: LateGpu) -> None:
    """Let all work end; then all must be where it should be, for steps too."""
    gpu.launch(store)
    gpu.rest()
    assert gpu.wrong == []
    for index in range(len(EXPERTS)):
        check_layer(store, index)


actions = st.lists(st.sampled_from(["launch", "compute", "copy", "tend"]), max_size=80)


@settings(max_examples=250, deadline=None)
@given(actions, st.booleans(), st.integers(0, COPIES), st.booleans(), st.integers(0, 80))
def test_steps_find_every_expert_while_others_change_places(
    order: list[str], keep_copy: bool, bad: int, refused: bool, gives_way_at: int
) -> None:
    gpu = LateGpu(**{"refused_at" if refused else "failed_at": bad})
    with pytest.MonkeyPatch.context() as patch:
        store, swaps = open_late(keep_copy, gpu)
        patch.setattr(stores, "copy_bytes", gpu.copy_table)
        before = swaps.placement()
        going = ExchangeRound(swaps, SWAPS)
        acts = {
            "launch": lambda: gpu.launch(store),
            "compute": gpu.compute,
            "copy": gpu.copy_on,
            "tend": lambda: tend(going, gpu),
        }
        for number, action in enumerate(order):
            acts[action]()
            if number == gives_way_at:
                going.give_way()
        check_all(store, gpu)
        while not going.over:
            tend(going, gpu)
            gpu.go_on()
        check_all(store, gpu)
        if going.error is not None:
            assert isinstance(going.error, CopyError)
            event("failed")
        else:
            assert swaps.placement().hot == swapped(before, going.done).hot
            assert len(going.done) == len(SWAPS) or len(order) > gives_way_at
        event(f"{len(going.done)} done")
        _exchange_more(store, gpu)
        check_all(store, gpu)


def _exchange_more(store: ExpertStore, gpu: LateGpu) -> None:
    """Whatever was left of exchanges before is taken up by others."""
    gpu.repair()
    for layer in reversed(store.layers):
        assert layer is not None
        cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
        exchange(layer, cold[0], layer.hot[0])
        assert cold[0] in layer.hot
    assert store.spare.exchange is None


@pytest.mark.parametrize("keep_copy", [False, True])
@pytest.mark.parametrize("kind", ["refused_at", "failed_at"])
def test_a_copy_that_fails_at_any_point_ends_the_round_and_harms_no_step(
    kind: str, keep_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = 0
    for bad in range(1, COPIES + 1):
        gpu = LateGpu(**{kind: bad})
        with monkeypatch.context() as patch:
            store, swaps = open_late(keep_copy, gpu)
            patch.setattr(stores, "copy_bytes", gpu.copy_table)
            going = ExchangeRound(swaps, SWAPS)
            while not going.over:
                gpu.launch(store)
                gpu.go_on()
                tend(going, gpu)
            failures += going.error is not None
            assert (going.error is None) == (len(going.done) == len(SWAPS))
            check_all(store, gpu)
            _exchange_more(store, gpu)
            check_all(store, gpu)
    tables = 2 * len(SWAPS) if kind == "refused_at" else 0  # those are not copied beside steps
    assert failures == (2 if keep_copy else 4) * len(SWAPS) + tables


def test_tables_of_layers_that_are_loaded_one_after_another_do_not_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = LateGpu()
    monkeypatch.setattr(stores, "open_copies", lambda device: gpu)
    monkeypatch.setattr(stores, "copy_bytes", gpu.copy_table)
    store = small_store([blob_layout(n) for n in EXPERTS], list(HOT), pin=True, cold="gpu")
    check_all(store, gpu)


def test_copies_go_on_while_steps_are_launched_and_nobody_waits() -> None:
    gpu = LateGpu()
    with pytest.MonkeyPatch.context() as patch:
        store, swaps = open_late(False, gpu)
        patch.setattr(stores, "copy_bytes", gpu.copy_table)
        gpu.launch(store)
        going = ExchangeRound(swaps, SWAPS[:1])
        assert not going.ready()  # it waits for the step that runs, and the host does not
        gpu.launch(store)
        gpu.compute()
        gpu.compute()
        for _ in range(4):
            assert not going.ready()
            gpu.copy_on()
        assert going.ready()
        assert gpu._steps  # the second step has not begun
        check_all(store, gpu)


def test_sides_change_after_steps_that_run_and_places_are_waited_for_by_nobody() -> None:
    gpu = LateGpu()
    with pytest.MonkeyPatch.context() as patch:
        store, swaps = open_late(False, gpu)
        patch.setattr(stores, "copy_bytes", gpu.copy_table)
        going = ExchangeRound(swaps, SWAPS[:1])
        while not going.ready():
            gpu.go_on()
        gpu.launch(store)
        gpu.compute()  # it has read the tables, and no expert yet
        going.turn()
        gpu.land()
        for _ in range(4):  # two copies to their places
            assert not going.ready()
            gpu.copy_on()
        assert going.ready()
        check_all(store, gpu)
