"""The catalogue of devices: every row is sound, and names find it."""

import pytest

from headroom.errors import OptionError
from headroom.machine.catalogue import CATALOGUE, find_device
from headroom.machine.drivers import read_gpus
from headroom.machine.gpus import nvidia_specs
from headroom.machine.targets import parse_device
from headroom.plan.lines import runtime_lines
from headroom.units import GIB, MIB


def test_the_catalogue_is_large_and_every_row_is_sound() -> None:
    assert len(CATALOGUE) >= 40
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE)
    for entry in CATALOGUE:
        spec = find_device(entry.name)
        assert 4 * GIB <= spec.total_bytes <= 512 * GIB
        assert 100e9 < spec.bandwidth < 10e12
        assert spec.unified == (spec.link == 0)
        assert (spec.sm > 0, spec.gfx != "").count(True) == (spec.kind != "metal")


@pytest.mark.parametrize(
    ("text", "name", "gibibytes"),
    [
        ("rtx3060-12gb", "rtx3060-12gb", 12),
        ("RTX 3090", "rtx3090-24gb", 24),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb", 24),
        ("rx7900xtx", "rx7900xtx-24gb", 24),
        ("MI50 32GB", "mi50-32gb", 32),
    ],
)
def test_a_device_is_found_by_its_name(text: str, name: str, gibibytes: int) -> None:
    device = find_device(text)
    assert (device.name, device.total_bytes) == (name, gibibytes * GIB)


def test_known_devices_have_their_architecture() -> None:
    assert find_device("rtx3060-12gb").sm == 86
    assert find_device("rtx2080ti-22gb").sm == 75
    assert find_device("rx7900xtx").gfx == "gfx1100"
    assert find_device("strixhalo-128gb").unified


@pytest.mark.parametrize(
    ("name", "free_mib"),  # of cards without a display, as drivers report them
    [("rtx3070-8gb", 7965), ("rtx3090-24gb", 24259), ("rtx4090-24gb", 24210), ("l4-24gb", 22479),
     ("t4-16gb", 14935), ("l40s-48gb", 45377), ("a100-80gb", 81158), ("h100-80gb", 81106)],
)  # fmt: skip
def test_what_an_idle_driver_keeps_is_not_planned_with(name: str, free_mib: int) -> None:
    device = find_device(name)
    assert device.available_bytes == device.total_bytes - device.driver_bytes
    assert abs(device.available_bytes - free_mib * MIB) < device.total_bytes / 128


def test_drivers_of_which_nothing_is_known_are_thought_to_keep_nothing() -> None:
    for name in ("rx7900xtx", "gb10-128gb", "m4max-128gb"):
        device = find_device(name)
        assert (device.driver_bytes, device.available_bytes) == (0, device.total_bytes)


def test_a_plan_tells_what_the_driver_keeps_apart_from_what_others_hold() -> None:
    card = find_device("rtx3060-12gb")
    (_, reserve) = runtime_lines(card)
    told = "512.0 MiB kept free, 288.0 MiB held by an idle driver, an estimate"
    assert (reserve.bytes, reserve.why) == (800 * MIB, told)
    report = "NVIDIA GeForce RTX 3060, 12288, 11000, 8.6, 580.1, GPU-a"
    (seen,) = nvidia_specs(read_gpus(report, {}))
    (_, reserve) = runtime_lines(seen)
    assert reserve.why == "512.0 MiB kept free, 1.26 GiB held by others"
    (_, reserve) = runtime_lines(parse_device("12GiB"))
    assert reserve.why == "512.0 MiB kept free"


def test_a_name_of_several_devices_lists_them() -> None:
    with pytest.raises(OptionError, match="Choose rtx3060-8gb, rtx3060-12gb, a size as 24GiB"):
        find_device("rtx3060")


def test_an_unknown_name_lists_similar_ones() -> None:
    with pytest.raises(OptionError) as caught:
        find_device("rtx3091")
    assert caught.value.message == "--device rtx3091 is unknown."
    assert "rtx3090-24gb" in caught.value.hint
