"""The store: every expert is found whole, whatever moves and whatever fails."""

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.errors import DeviceError
from headroom.experts import store as stores
from headroom.experts.copies import HostCopies, Mark
from headroom.experts.exchange import StoreExchanges
from headroom.experts.placement import LayerExperts
from headroom.experts.store import drop_cold
from headroom.layers import host_memory
from headroom.plan.cost_model import ColdSpeeds, DecodeChoice
from tests.experts.stores import blob_layout, check_layer, exchange, small_store
from tests.stand_in.driver import Driver
from tests.stand_in.gpu import stand_in_driver

Moves = list[tuple[int, int, int]]  # layer, and which of its cold and hot experts


class CopyError(RuntimeError):
    """A copy that did not happen."""


class FailingCopies(HostCopies):
    """Copies that fail at some number, counted from the first."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        self.left -= 1
        if self.left == 0:
            out.view(-1)[: out.numel() // 2] = 0  # half of it was written, even
            raise CopyError
        return super().copy(out, sources, after)

    def copy_table(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise CopyError  # of a table: one copy, all of it or nothing
        to.copy_(source)


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    """Layers of some experts, of which some are hot; a layer may have none, or all hot."""
    experts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    hot = [tuple(sorted(draw(st.sets(st.sampled_from(range(n)))))) if n else () for n in experts]
    if all(len(ids) == n for n, ids in zip(experts, hot, strict=True)):
        experts, hot = [*experts, 2], [*hot, (1,)]
    return experts, hot


moves = st.lists(st.tuples(*(st.integers(0, 9),) * 3), max_size=6)


@settings(max_examples=60, deadline=None)
@given(placements(), moves, st.booleans())
def test_exchanges_lose_no_expert_and_hold_none_twice(
    placement: tuple[list[int], list[tuple[int, ...]]], moves: Moves, keep_copy: bool
) -> None:
    experts, hot = placement
    sizes = [(48, 48, 32), (64, 64, 64), (16, 32, 32), (48, 48, 32)]
    layouts = [blob_layout(n, sizes[i]) if n else None for i, n in enumerate(experts)]
    store = small_store(layouts, hot, keep_copy=keep_copy)
    mixed = [index for index, layer in enumerate(store.layers) if layer is not None]
    for index in mixed:
        check_layer(store, index)
    for choice, promoted, demoted in moves:
        index = mixed[choice % len(mixed)]
        layer = store.layers[index]
        assert layer is not None
        cold = [expert for expert in range(layer.experts) if expert not in layer.hot]
        if not layer.hot:
            continue
        pair = cold[promoted % len(cold)], layer.hot[demoted % len(layer.hot)]
        exchange(layer, *pair)
        assert pair[0] in layer.hot
        assert pair[1] not in layer.hot
        for each in mixed:
            check_layer(store, each)
    assert store.current_placement().total == sum(map(len, hot))


class CountedCopies(HostCopies):
    """Copies that know how many bytes went from one side to the other."""

    def __init__(self, device: Sequence[torch.Tensor]) -> None:
        self.device = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in device]
        self.crossed = 0

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        for source in sources:
            if self._inside(out) != self._inside(source):
                self.crossed += source.nbytes
        return super().copy(out, sources, after)

    def _inside(self, blob: torch.Tensor) -> bool:
        return any(start <= blob.data_ptr() < end for start, end in self.device)


@pytest.mark.parametrize("keep_copy", [False, True])
def test_an_exchange_sends_as_much_over_the_link_as_exchanges_count(keep_copy: bool) -> None:
    store = small_store([blob_layout(5)], [(0, 2)], keep_copy=keep_copy)
    layer = store.layers[0]
    assert layer is not None
    copies = store.spare.copies = CountedCopies([layer.slots, store.spare.device])
    exchange(layer, 1, 2)
    told = StoreExchanges(store, [LayerExperts(5, 1)], same_bits=True).layers()[0]
    assert copies.crossed == told.exchange_bytes == (1 if keep_copy else 3) * layer.expert_bytes


@pytest.mark.parametrize("keep_copy", [False, True])
@pytest.mark.parametrize("fail_at", range(1, 7))
def test_a_copy_that_fails_leaves_every_expert_where_its_table_says(
    fail_at: int, keep_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [blob_layout(5), blob_layout(4)]
    store = small_store(layouts, [(0, 2, 4), (1,)], keep_copy=keep_copy)
    first, second = store.layers
    assert first is not None
    assert second is not None
    copies = store.spare.copies = FailingCopies(fail_at)
    table, flags = first.addresses.clone(), first.is_hot.clone()
    monkeypatch.setattr(stores, "copy_bytes", copies.copy_table)
    failed = False
    try:
        exchange(first, 1, 2)
    except CopyError:
        failed = True
    copies.left = 0  # nothing fails from here on
    assert failed == (fail_at <= (4 if keep_copy else 6))
    check_layer(store, 0)
    check_layer(store, 1)
    if fail_at <= (2 if keep_copy else 3):  # before any table was written
        assert torch.equal(first.addresses, table)
        assert torch.equal(first.is_hot, flags)
    # What another layer, or the same one, does next takes it up.
    exchange(second, 3, 1)
    if 1 not in first.hot:
        exchange(first, 1, 2)
    for index in range(2):
        check_layer(store, index)
    assert (first.hot, second.hot) == ((0, 1, 4), (3,))
    assert store.spare.exchange is None


def test_only_a_cold_expert_comes_and_only_a_hot_one_goes() -> None:
    layer = small_store([blob_layout(3)], [(0,)]).layers[0]
    assert layer is not None
    with pytest.raises(ValueError, match="expert 0 must be cold and 1 hot"):
        exchange(layer, 0, 1)
    with pytest.raises(ValueError, match="expert 0 must be cold and 0 hot"):
        exchange(layer, 0, 0)
    with pytest.raises(ValueError, match="expert 1 must be cold and 2 hot"):
        exchange(layer, 1, 2)
    for promoted, demoted in ((3, 0), (-1, 0), (1, 3), (1, -1)):
        with pytest.raises(IndexError, match=f"experts {promoted} and {demoted} of 3"):
            exchange(layer, promoted, demoted)
    with pytest.raises(ValueError, match="no exchange of this layer was begun"):
        layer.finish_exchange()


def test_an_exchange_that_was_only_begun_changes_nothing() -> None:
    store = small_store([blob_layout(3)], [(0,)])
    layer = store.layers[0]
    assert layer is not None
    layer.begin_exchange(1, 0)
    check_layer(store, 0)
    layer.begin_exchange(2, 0)
    layer.finish_exchange()
    check_layer(store, 0)
    assert layer.hot == (2,)


def test_layers_whose_experts_are_all_hot_are_not_in_the_store() -> None:
    store = small_store([None, blob_layout(2), blob_layout(3)], [(), (0, 1), (2,)])
    assert [layer is None for layer in store.layers] == [True, True, False]
    assert store.current_placement().hot == ((), (0, 1), (2,))
    assert store.cold_bytes == 2 * 128


def test_host_memory_holds_only_cold_experts_unless_a_copy_is_kept() -> None:
    plain, copies = (
        small_store([blob_layout(5)], [(1, 3)], keep_copy=keep).layers[0] for keep in (False, True)
    )
    assert plain is not None
    assert copies is not None
    assert (len(plain.cold), len(copies.cold)) == (3, 5)
    assert plain.cold_of(1) is None
    assert copies.cold_of(1) is not None
    alone, beside = (
        small_store([blob_layout(n) for n in experts], hot, keep_copy=True)
        for experts, hot in (((5,), [(1, 3)]), ((5, 2), [(1, 3), (0, 1)]))
    )
    assert len(beside.memory) == len(alone.memory)  # a layer that is all hot needs no copy


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver that pins memory, or refuses to."""
    monkeypatch.setattr(host_memory, "pinnable_bytes", lambda limits: 8 << 20)
    with stand_in_driver(monkeypatch) as driver:
        yield driver


@pytest.mark.parametrize(
    ("wanted", "path", "keep_copy"),
    [
        ("auto", "gpu", False),
        ("gpu", "gpu", False),
        ("cpu", "cpu", False),
        ("drop", "drop", True),
    ],
)
def test_pinned_experts_are_read_by_the_gpu(
    wanted: str, path: str, keep_copy: bool, pinning: Driver
) -> None:
    store = small_store([blob_layout(3)], [(0,)], cold=wanted, pin=True, keep_copy=keep_copy)
    assert store.pinned
    assert store.layers[0] is not None
    assert store.layers[0].path == path
    check_layer(store, 0)


def test_a_driver_that_does_not_pin_leaves_cold_experts_to_the_cpu_and_says_so(
    pinning: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    pinning.refuse_to_pin()
    store = small_store([blob_layout(3)], [(0,)], cold="auto", pin=True)
    assert store.layers[0] is not None
    assert store.layers[0].path == "cpu"
    check_layer(store, 0)
    assert (
        "384 B of cold experts are not pinned (out of memory; the control group allows 8.0 MiB)"
        in caplog.text
    )


def test_a_driver_that_does_not_pin_what_is_left_out_says_that_nobody_computes_it(
    pinning: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    pinning.refuse_to_pin()
    small_store([blob_layout(3)], [(0,)], cold="drop", pin=True, keep_copy=True)
    assert caplog.messages == [
        "experts: 640 B of cold experts are not pinned (out of memory; the control group allows "
        "8.0 MiB): they are left out, and exchanges come only between requests"
    ]


@pytest.mark.parametrize(
    ("cold", "pin", "told"),
    [
        ("gpu", True, "512 B of host memory, pinned), placement: drawn, cold: read by the GPU"),
        ("cpu", True, "512 B of host memory, pinned), placement: drawn, cold: computed by the CPU"),
        (
            "cpu",
            False,
            "512 B of host memory, not pinned), placement: drawn, cold: computed by the CPU",
        ),
        ("drop", True, "not held), placement: drawn, cold: left out"),
    ],
)
def test_the_log_shows_what_is_hot_and_cold_and_who_computes_it(
    cold: str,
    pin: bool,
    told: str,
    pinning: Driver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        small_store([blob_layout(3), None, blob_layout(4)], [(0,), (), (1, 2)], cold=cold, pin=pin)
    assert caplog.messages == [f"experts: 3 hot (384 B on cpu), 4 cold ({told}"]


def test_the_log_shows_in_how_many_layers_who_computes_cold_experts_where_they_differ(
    pinning: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    paths = iter(
        [DecodeChoice("gpu", (0, 1)), DecodeChoice("cpu", (0, 1)), DecodeChoice("gpu", (0, 1))]
    )
    monkeypatch.setattr(stores, "choose_decode", lambda *facts, **rates: next(paths))
    with caplog.at_level(logging.INFO):
        small_store([blob_layout(3)] * 3, [(0,), (1,), (2,)], cold="auto", pin=True)
    assert caplog.messages[0].endswith(
        "cold: read by the GPU in 2 layers, computed by the CPU and read by the GPU in 1 layer"
    )
    assert "chosen by listed speeds" in caplog.messages[1]


NO_CPU = ColdSpeeds(gpu=1e12, link=1e10, cpu=0.0, handover_s=1e-5, measured=True)


def test_without_the_cpp_module_a_warning_says_what_is_slower_and_what_to_install(
    pinning: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stores, "MISSING", "not built")
    store = small_store([blob_layout(3)], [(0,)], cold="auto", pin=True, speeds=NO_CPU)
    assert store.layers[0] is not None
    assert store.layers[0].path == "gpu"
    warnings = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert warnings == [
        "experts: the CPU takes no part in computing cold experts, because the C++ module is not "
        "built. The GPU reads all of them over its link, which is slower. Install a C++ compiler "
        "and run pip install again for headroom; --cold gpu turns this warning off"
    ]


@pytest.mark.parametrize(("cold", "keep_copy"), [("gpu", False), ("drop", True), ("drop", False)])
def test_who_wants_nothing_of_the_cpu_is_not_warned_of_a_missing_cpp_module(
    cold: str, keep_copy: bool, pinning: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    small_store([blob_layout(3)], [(0,)], cold=cold, pin=True, keep_copy=keep_copy, speeds=NO_CPU)
    assert not [x for x in caplog.records if x.levelno == logging.WARNING]


def test_a_gpu_that_must_read_what_is_not_pinned_is_refused(pinning: Driver) -> None:
    pinning.refuse_to_pin()
    with pytest.raises(DeviceError) as refused:
        small_store([blob_layout(3)], [(0,)], cold="gpu", pin=True)
    assert str(refused.value) == (
        "The GPU's driver does not pin 384 B of host memory for cold experts: out of memory; "
        "the control group allows 8.0 MiB. Free host memory, raise the limit of the control group, "
        "keep more experts on the GPU, or let the CPU compute cold ones with --cold cpu."
    )


def test_dropped_experts_leave_their_share_to_the_hot_ones_of_a_row() -> None:
    is_hot = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    ids = torch.tensor([[0, 1], [0, 2], [1, 3]])
    weights = torch.tensor([[0.6, 0.2], [0.5, 0.5], [0.7, 0.3]])
    wanted = torch.tensor([[0.8, 0.0], [0.5, 0.5], [0.0, 0.0]])
    torch.testing.assert_close(drop_cold(ids, weights, is_hot), wanted)
