"""What --device and --ram stand for."""

import pytest

from headroom.errors import OptionError
from headroom.machine.targets import parse_device, plan_devices
from headroom.options import Options
from headroom.units import GIB


def test_a_size_is_a_gpu_of_that_size() -> None:
    device = parse_device("24GiB")
    assert (device.kind, device.total_bytes, device.name) == ("cuda", 24 * GIB, "24.00GiB")


@pytest.mark.parametrize("text", ["0GiB", "-4GiB", "12 parsecs", "nothing", ""])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_device(text)


def test_a_plan_for_gpus_has_the_host_behind_them() -> None:
    devices = plan_devices(Options(device="rtx3090, rtx3090,12GiB", ram="64GiB"))
    assert [device.name for device in devices] == [
        "rtx3090-24gb", "rtx3090-24gb#2", "12.00GiB", "host",
    ]  # fmt: skip
    assert [device.runs_layers for device in devices] == [True, True, True, False]
    assert devices[-1].total_bytes == 64 * GIB


def test_a_machine_with_unified_memory_has_no_host_behind_it() -> None:
    (device,) = plan_devices(Options(device="strixhalo-128gb"))
    assert device.holds_all


def test_without_a_device_the_plan_is_for_this_cpu() -> None:
    (device,) = plan_devices(Options(ram="8GiB"))
    assert (device.name, device.available_bytes, device.runs_layers) == ("cpu", 8 * GIB, True)


@pytest.mark.parametrize("options", [{"ram": "0GiB"}, {"ram": "much"}])
def test_contradictory_devices_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        plan_devices(Options(**options))  # type: ignore[arg-type]


def test_a_device_of_this_machine_that_is_named_twice_is_two_stages_with_half_its_memory() -> None:
    whole = plan_devices(Options(ram="8GiB"))[0]
    halves = plan_devices(Options(device="cpu,cpu", ram="8GiB"))
    assert [device.name for device in halves] == ["cpu", "cpu#2"]
    assert {device.total_bytes for device in halves} == {whole.total_bytes // 2}
    cards = plan_devices(Options(device="rtx3060-12gb,rtx3060-12gb", ram="8GiB"))
    assert [card.total_bytes for card in cards[:2]] == 2 * [12 * GIB]  # two cards of a catalogue
