"""The catalogue, this machine's GPUs as drivers report them, and what --device stands for."""

from pathlib import Path

import pytest

from headroom.errors import OptionError
from headroom.machine import gpus
from headroom.machine.catalogue import CATALOGUE, find_device
from headroom.machine.drivers import read_gpus
from headroom.machine.gpus import find_gpu, gfx_name, nvidia_specs, read_amd
from headroom.machine.readiness import GpuMemory
from headroom.machine.targets import parse_device, plan_devices
from headroom.options import Options
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


def test_the_driver_reports_what_is_free_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (f"NVIDIA H200, 143771, {free}, 9.0, 580.1, GPU-{free}" for free in (143000, 200))
    found = nvidia_specs(read_gpus("\n".join(rows), {}))
    monkeypatch.setattr(gpus, "detect_gpus", lambda: found)
    assert gpus.driver_memory("cuda:1") == GpuMemory(200 * MIB, 143771 * MIB)
    assert gpus.driver_memory("cuda:2") == GpuMemory(0, 0)


def test_a_name_of_several_devices_lists_them() -> None:
    with pytest.raises(OptionError, match="Choose rtx3060-8gb, rtx3060-12gb, a size as 24GiB"):
        find_device("rtx3060")


def test_an_unknown_name_lists_similar_ones() -> None:
    with pytest.raises(OptionError) as caught:
        find_device("rtx3091")
    assert caught.value.message == "--device rtx3091 is unknown."
    assert "rtx3090-24gb" in caught.value.hint


def test_a_size_is_a_gpu_of_that_size() -> None:
    device = parse_device("24GiB")
    assert (device.kind, device.total_bytes, device.name) == ("cuda", 24 * GIB, "24.00GiB")


@pytest.mark.parametrize("text", ["0GiB", "-4GiB", "12 parsecs", "nothing", ""])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_device(text)


def test_gpus_of_this_machine_are_read_from_the_drivers_report() -> None:
    report = (
        "NVIDIA GeForce RTX 3090, 24576, 20000, 8.6, 580.1, GPU-a\n"
        "Odd Card, 8192, 8192, [N/A], 580.1, GPU-b\n"
        "NVIDIA GB10, [N/A], [N/A], 12.1, 580.1, GPU-c\nno\n"
    )
    first, second = nvidia_specs(read_gpus(report, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert (first.name, first.sm, first.bandwidth) == ("cuda:0", 86, 936e9)
    assert (first.total_bytes, first.available_bytes) == (24576 * MIB, 20000 * MIB)
    assert (second.name, second.sm) == ("cuda:1", 0)
    assert (first.product, second.product) == ("NVIDIA GeForce RTX 3090", "Odd Card")
    assert find_gpu("cuda:1", [first, second]) is second


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(OptionError, match=r"--device hip:7 is not on this machine. It has cpu"):
        find_gpu("hip:7", [])


@pytest.mark.parametrize(
    ("version", "name"),
    [(90006, "gfx906"), (90010, "gfx90a"), (90402, "gfx942"), (100300, "gfx1030"),
     (110001, "gfx1101"), (110501, "gfx1151"), (120001, "gfx1201")],
)  # fmt: skip
def test_a_target_version_has_its_gfx_name(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_amd_gpus_are_read_from_the_kernel(tmp_path: Path) -> None:
    for node, version, size in ((0, 0, 64 * GIB), (1, 90006, 16 * GIB)):
        bank = tmp_path / str(node) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")
        (tmp_path / str(node) / "properties").write_text(f"gfx_target_version {version}\n")
    (device,) = read_amd(tmp_path)
    assert (device.name, device.kind, device.gfx) == ("hip:0", "hip", "gfx906")
    assert device.total_bytes == 16 * GIB


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


@pytest.mark.parametrize("options", [{"device": "cpu,cpu"}, {"ram": "0GiB"}, {"ram": "much"}])
def test_contradictory_devices_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        plan_devices(Options(**options))  # type: ignore[arg-type]
