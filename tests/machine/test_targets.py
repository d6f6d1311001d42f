"""What --device and --ram stand for."""

import pytest

from headroom.errors import OptionError
from headroom.machine.devices import DeviceSpec
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


def test_a_cpu_computes_with_the_threads_that_it_is_given_and_reads_as_fast() -> None:
    whole = DeviceSpec(name="cpu", kind="cpu", total_bytes=1, available_bytes=1, cores=8,
                       bandwidth=5e10, flops=4e11, experts=2e10, expert_flops=1e11)  # fmt: skip
    half = whole.with_threads(4)
    assert (half.flops, half.experts, half.expert_flops) == (2e11, 1e10, 5e10)
    assert (half.bandwidth, half.cores) == (5e10, 8)
    assert whole.with_threads(16) == whole
    here, one = (plan_devices(Options(threads=threads))[0] for threads in (None, 1))
    assert one.flops == pytest.approx(here.flops / here.cores)


def test_a_device_of_this_machine_that_is_named_twice_is_two_stages_with_half_its_memory() -> None:
    whole = plan_devices(Options(ram="8GiB"))[0]
    halves = plan_devices(Options(device="cpu,cpu", ram="8GiB"))
    assert [device.name for device in halves] == ["cpu", "cpu#2"]
    assert {device.total_bytes for device in halves} == {whole.total_bytes // 2}
    cards = plan_devices(Options(device="rtx3060-12gb,rtx3060-12gb", ram="8GiB"))
    assert [card.total_bytes for card in cards[:2]] == 2 * [12 * GIB]  # two cards of a catalogue
