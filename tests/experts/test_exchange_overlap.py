"""Exchanges whose copies run during steps: a step finds every expert whole, whatever fails."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headroom.errors import KernelError
from headroom.experts.exchange import Exchange, ExchangeRound, StoreExchanges
from headroom.experts.placement import LayerExperts
from headroom.experts.store import ExpertStore
from tests.experts.stores import (
    blob_layout,
    check_layer,
    content_bytes,
    exchange,
    placement_after,
    small_store,
)
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.streams import StandInError
from tests.stand_in.tensors import plain

EXPERTS = (5, 4)
HOT = [(0, 2, 4), (1,)]
LAYERS = [LayerExperts(count, 1) for count in EXPERTS]
# Expert 1 comes and goes again; 3 follows it to the same slot.
EXCHANGES = [Exchange(0, 1, 2, 1.0, 2), Exchange(1, 3, 1, 1.0, 2), Exchange(0, 3, 1, 1.0, 2)]
COPIES = 4 * len(EXCHANGES) + 2 * len(EXCHANGES)  # of experts, and of tables


@dataclass(eq=False)
class LateSteps:
    """Steps of the stand-in GPU, which computes and copies only when a test lets it."""

    gpu: StandInGpu
    wrong: list[str] = field(default_factory=list)  # what steps did not find whole

    def launch(self, store: ExpertStore) -> None:
        """Launch a step that reads all experts."""
        self.gpu.queues.main.queue(self._step(store))

    def compute(self) -> None:
        """Do a part of the step that is next; nothing if there is none."""
        self.gpu.queues.main.advance()

    def copy_on(self) -> None:
        """Do a part of the copy that is next, if it may begin."""
        for stream in self.gpu.queues.streams[1:]:
            stream.advance()

    def go_on(self) -> None:
        """Do a part of the copy and of the step that are next."""
        self.copy_on()
        self.compute()

    def _step(self, store: ExpertStore) -> Iterator[None]:
        """Read the tables, and after a while what they point to, as kernels and a CPU do."""
        layers = [(index, layer) for index, layer in enumerate(store.layers) if layer is not None]
        with torch._C.DisableTorchFunction():
            seen = [(plain(x.addresses).tolist(), plain(x.is_hot).tolist()) for _, x in layers]
        yield
        for (index, layer), (by_gpu, is_hot) in zip(layers, seen, strict=True):
            with torch._C.DisableTorchFunction():
                by_cpu = layer.host_addresses.tolist()
            for expert in range(layer.experts):
                places = {"gpu": by_gpu[expert][0]}
                if not is_hot[expert]:
                    places["cpu"] = by_cpu[expert][0]
                wanted = content_bytes(index, expert, layer.expert_bytes)
                for who, place in places.items():
                    if not place or ctypes.string_at(place, layer.expert_bytes) != wanted:
                        self.wrong.append(f"{who}: expert {expert} of layer {index}")


@contextmanager
def late_steps() -> Iterator[LateSteps]:
    """The stand-in GPU in the hands of a test."""
    with pytest.MonkeyPatch.context() as patch, stand_in_gpu(patch) as gpu:
        gpu.queues.stepped = True
        yield LateSteps(gpu)


def open_late(keep_copy: bool, late: LateSteps, **bad: int) -> tuple[ExpertStore, StoreExchanges]:
    """A store whose copies may fail: `refused_at` or `failed_at` counts them from 1."""
    layouts = [blob_layout(count) for count in EXPERTS]
    store = small_store(
        list(layouts), list(HOT), "cuda:0", keep_copy=keep_copy, pin=True, cold="gpu"
    )
    queues = late.gpu.queues
    queues.finish()
    queues.asked = 0
    for name, number in bad.items():
        setattr(queues, name, number)
    return store, StoreExchanges(store, LAYERS, same_bits=True)


def tend(exchanges: ExchangeRound, late: LateSteps) -> None:
    """Do what an engine does between two steps."""
    if exchanges.over or not exchanges.ready():
        return
    if exchanges.turned:
        exchanges.end()
    else:
        late.gpu.queues.main.drain()
        exchanges.turn()


def check_all(store: ExpertStore, late: LateSteps) -> None:
    """Let all work end; then all must be where it should be, for steps too."""
    late.launch(store)
    late.gpu.queues.finish()
    assert late.wrong == []
    for index in range(len(EXPERTS)):
        check_layer(store, index)


actions = st.lists(st.sampled_from(["launch", "compute", "copy", "tend"]), max_size=80)


@settings(max_examples=250, deadline=None)
@given(actions, st.booleans(), st.integers(0, COPIES), st.booleans(), st.integers(0, 80))
def test_steps_find_every_expert_while_others_change_places(
    order: list[str], keep_copy: bool, bad: int, refused: bool, gives_way_at: int
) -> None:
    with late_steps() as late:
        kind = "refused_at" if refused else "failed_at"
        store, exchanges = open_late(keep_copy, late, **{kind: bad})
        before = exchanges.placement()
        going = ExchangeRound(exchanges, EXCHANGES)
        acts = {
            "launch": lambda: late.launch(store),
            "compute": late.compute,
            "copy": late.copy_on,
            "tend": lambda: tend(going, late),
        }
        for number, action in enumerate(order):
            acts[action]()
            if number == gives_way_at:
                going.give_way()
        check_all(store, late)
        while not going.over:
            tend(going, late)
            late.go_on()
        check_all(store, late)
        if going.error is not None:
            assert isinstance(going.error, KernelError | StandInError)
            event("failed")
        else:
            assert exchanges.placement().hot == placement_after(before, going.done).hot
            assert len(going.done) == len(EXCHANGES) or len(order) > gives_way_at
        event(f"{len(going.done)} done")
        _exchange_more(store, late)
        check_all(store, late)


def _exchange_more(store: ExpertStore, late: LateSteps) -> None:
    """Whatever was left of exchanges before is taken up by others."""
    late.gpu.queues.repair()
    for layer in reversed(store.layers):
        assert layer is not None
        cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
        exchange(layer, cold[0], layer.hot[0])
        assert cold[0] in layer.hot
    assert store.spare.exchange is None


@pytest.mark.parametrize("keep_copy", [False, True])
@pytest.mark.parametrize("kind", ["refused_at", "failed_at"])
def test_a_copy_that_fails_at_any_point_ends_the_round_and_harms_no_step(
    kind: str, keep_copy: bool
) -> None:
    failures = 0
    for bad in range(1, COPIES + 1):
        with late_steps() as late:
            store, exchanges = open_late(keep_copy, late, **{kind: bad})
            going = ExchangeRound(exchanges, EXCHANGES)
            while not going.over:
                late.launch(store)
                late.go_on()
                tend(going, late)
            failures += going.error is not None
            assert (going.error is None) == (len(going.done) == len(EXCHANGES))
            check_all(store, late)
            _exchange_more(store, late)
            check_all(store, late)
    tables = 2 * len(EXCHANGES) if kind == "refused_at" else 0  # tables are not copied during steps
    assert failures == (2 if keep_copy else 4) * len(EXCHANGES) + tables


def test_tables_of_layers_that_are_loaded_one_after_another_do_not_mix() -> None:
    with late_steps() as late:
        layouts = [blob_layout(count) for count in EXPERTS]
        check_all(small_store(layouts, list(HOT), "cuda:0", pin=True, cold="gpu"), late)


def test_copies_run_while_steps_are_launched_and_nothing_waits() -> None:
    with late_steps() as late:
        store, exchanges = open_late(False, late)
        late.launch(store)
        going = ExchangeRound(exchanges, EXCHANGES[:1])
        assert not going.ready()  # it waits for the step that runs, and the host does not
        late.launch(store)
        late.compute()
        late.compute()
        for _ in range(4):
            assert not going.ready()
            late.copy_on()
        assert going.ready()
        assert late.gpu.queues.main.busy  # the second step has not begun
        check_all(store, late)


def test_a_turn_waits_for_running_steps_and_copies_to_new_places_are_not_waited_for() -> None:
    with late_steps() as late:
        store, exchanges = open_late(False, late)
        going = ExchangeRound(exchanges, EXCHANGES[:1])
        while not going.ready():
            late.go_on()
        late.launch(store)
        late.compute()  # it has read the tables, and no expert yet
        going.turn()
        late.gpu.queues.main.drain()
        for _ in range(4):  # two copies to their places
            assert not going.ready()
            late.copy_on()
        assert going.ready()
        check_all(store, late)
