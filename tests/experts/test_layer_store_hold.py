"""Slots of a cached layer that the host fills: whatever fails, the table finds every expert."""

from collections.abc import Iterator

import pytest
import torch

from headroom.experts import cache, layer_store
from headroom.experts.cache import POLICIES, RULES
from headroom.experts.layer_store import LayerStore
from headroom.experts.policies import PolicyKeeper
from headroom.experts.store import ExpertStore
from headroom.kernels.cuda import expert_cache
from headroom.kernels.ops import Picks
from tests.experts.stores import blob_layout, check_cached_layer, small_store
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

EXPERTS = 8
PLACED = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    with stand_in_gpu(monkeypatch) as made:
        yield made


class FailingCopies:
    """Copies of which one fails, when half of it is written; of a table, all of it or nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.fails_at, self.made = fails_at, 0
        self._copy = layer_store.copy_bytes
        monkeypatch.setattr(layer_store, "copy_bytes", self)

    def __call__(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.made += 1
        if self.made == self.fails_at:
            if len(to) == len(source) == blob_layout(1).nbytes:  # an expert, not a table
                to[: len(to) // 2].zero_()
            raise RuntimeError("a copy failed")
        self._copy(to, source)


def cached_store(policy: str = "lru") -> ExpertStore:
    layouts = [blob_layout(EXPERTS), blob_layout(EXPERTS)]
    given = {"cold": "gpu", "pin": True, "keep_copy": True, "policy": policy}
    return small_store(layouts, [PLACED, PLACED], "cuda:0", **given)  # type: ignore[arg-type]


def layer_of(store: ExpertStore) -> LayerStore:
    layer = store.layers[0]
    assert layer is not None
    return layer


@pytest.mark.parametrize("hot", [(0, 5, 6, 7), (4, 5, 6, 7), (0, 1, 2, 3), (6,), ()])
def test_exactly_the_experts_that_are_named_are_resident(hot: tuple[int, ...]) -> None:
    store = cached_store()
    layer = layer_of(store)
    assert layer.lookup.state is not None
    origins = expert_cache.origins_of(layer.lookup.state).fill_(1)
    coming = [expert for expert in hot if expert not in PLACED]
    assert layer.hold(hot) == len(coming) * layer.expert_bytes
    assert check_cached_layer(store, 0) == sorted(hot)
    moved = {*hot} ^ {*PLACED}  # their next hits are of experts that the host put there
    assert origins.cpu().tolist() == [int(expert not in moved) for expert in range(EXPERTS)]
    layer.slots.random_(0, 255)
    assert layer.hold(hot, copy_all=True) == len(hot) * layer.expert_bytes
    assert check_cached_layer(store, 0) == sorted(hot)
    layer.hold(PLACED)  # free slots are used, too
    assert check_cached_layer(store, 0) == [*PLACED]
    assert check_cached_layer(store, 1) == [*PLACED]


@pytest.mark.parametrize(
    ("copy_all", "fails_at"),
    # A table, three or all four experts, and a table.
    [*((False, number) for number in range(1, 6)), *((True, number) for number in range(1, 7))],
)
def test_after_a_copy_that_fails_the_table_finds_every_expert_whole(
    copy_all: bool, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cached_store()
    layer, hot = layer_of(store), (0, 5, 6, 7)
    with monkeypatch.context() as patch:
        FailingCopies(patch, fails_at)
        with pytest.raises(RuntimeError, match="a copy failed"):
            layer.hold(hot, copy_all=copy_all)
    staying = [] if copy_all else [0]
    assert check_cached_layer(store, 0) == ([*PLACED] if fails_at == 1 else staying)
    store.repair()  # fills what is free
    assert len(check_cached_layer(store, 0)) == len(PLACED)
    layer.hold(hot)
    assert check_cached_layer(store, 0) == [*hot]


@pytest.mark.parametrize("fails_at", range(1, 13))
def test_a_repair_that_fails_leaves_a_valid_table_and_the_next_one_fills_all_slots(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cached_store()
    layer = layer_of(store)
    layer.hold((4, 5, 6, 7))
    # A step that failed has given a slot to expert 4, whose bytes never came.
    slot = layer.slot_of(4)
    assert slot is not None
    slot.random_(0, 255)
    with monkeypatch.context() as patch:
        FailingCopies(patch, fails_at)  # two layers with two tables and four experts each
        with pytest.raises(RuntimeError, match="a copy failed"):
            store.repair()
    if fails_at > 1:
        check_cached_layer(store, 0)
    store.repair()
    assert len(check_cached_layer(store, 0)) == len(PLACED)
    assert check_cached_layer(store, 1) == [*PLACED]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_steps_leave_a_slot_free_that_a_failed_copy_has_left_so(policy: str) -> None:
    store = cached_store(policy)
    layer = layer_of(store)
    layer.hold((1, 3))  # slots 0 and 2 are free
    for expert in (4, 4, 4, 5, 6, 5, 6, 6, 0, 2, 2, 2, 3):
        ids = torch.tensor([[expert]], dtype=torch.int32).to("cuda")
        expert_cache.resolve(Picks(ids, torch.ones(1, 1).to("cuda")), layer.lookup, RULES, None)
        assert layer.lookup.filling is not None
        expert_cache.fill(layer.lookup.filling)
        assert len(check_cached_layer(store, 0)) == 2
        assert sorted(layer.is_hot.cpu().tolist())[-2:] == [2, 4]
    assert check_cached_layer(store, 0) != [1, 3]


@pytest.mark.parametrize("fails_at", range(1, 11))
def test_a_return_to_the_placement_that_fails_is_logged_and_ends_no_request(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = cached_store("auto")
    keeper = PolicyKeeper(store, "counts", store.spare.copies.mark, lambda: 0.0)
    for layer in store.layers:
        assert layer is not None
        layer.hold((0, 5, 6, 7))
    keeper.follow()  # begins a reading
    keeper._restores.extend((layer, PLACED) for layer in store.layers if layer is not None)
    with monkeypatch.context() as patch:
        FailingCopies(patch, fails_at)
        keeper.follow()
    assert "those of the placement are not all brought back" in caplog.text
    assert not keeper._restores
    for index in range(2):
        check_cached_layer(store, index)
    keeper.follow()
