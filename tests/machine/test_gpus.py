"""This machine's GPUs as their drivers report them."""

from pathlib import Path

import pytest

from headroom.errors import OptionError
from headroom.machine import gpus
from headroom.machine.drivers import read_gpus
from headroom.machine.gpus import find_gpu, gfx_name, nvidia_specs, read_amd
from headroom.machine.readiness import GpuMemory
from headroom.units import GIB, MIB


def test_the_driver_reports_what_is_free_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (f"NVIDIA H200, 143771, {free}, 9.0, 580.1, GPU-{free}" for free in (143000, 200))
    found = nvidia_specs(read_gpus("\n".join(rows), {}))
    monkeypatch.setattr(gpus, "detect_gpus", lambda: found)
    assert gpus.driver_memory("cuda:1") == GpuMemory(200 * MIB, 143771 * MIB)
    assert gpus.driver_memory("cuda:2") == GpuMemory(0, 0)


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
