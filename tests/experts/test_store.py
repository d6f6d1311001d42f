"""The store: what it allocates, who computes cold experts, what it logs and refuses."""

import logging
from collections.abc import Iterator

import pytest
import torch

from headroom.errors import DeviceError
from headroom.experts import store as stores
from headroom.experts.store import drop_cold
from headroom.layers import host_memory
from headroom.plan.cost_model import ColdSpeeds, DecodeChoice
from tests.experts.stores import blob_layout, check_layer, small_store
from tests.stand_in.driver import Driver
from tests.stand_in.gpu import stand_in_driver


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
