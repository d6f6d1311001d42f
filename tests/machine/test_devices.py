"""The CPU as a device: its memory and cores by the system and by control groups."""

import os
import resource
from pathlib import Path

import pytest

from headroom.machine.cgroups import GroupLimits
from headroom.machine.devices import (
    DeviceSpec,
    detect_cpu,
    pinnable_bytes,
    torch_name,
    usable_cores,
)
from headroom.units import GIB, KIB

UNLIMITED = GroupLimits(None, None, None)


@pytest.mark.parametrize(("share", "most"), [(0.5, 1), (1.5, 2), (None, 10**6)])
def test_cores_follow_the_share_of_time(share: float | None, most: int) -> None:
    assert 1 <= usable_cores(GroupLimits(None, None, share)) <= most


def test_the_cpu_has_the_memory_that_its_group_allows(tmp_path: Path) -> None:
    lines = f"MemTotal: {8 * GIB // KIB} kB\nMemAvailable: {GIB // KIB} kB\n"
    (tmp_path / "meminfo").write_text(lines)
    free = detect_cpu(tmp_path, GroupLimits(None, None, None))
    assert (free.total_bytes, free.available_bytes) == (8 * GIB, GIB)
    bound = detect_cpu(tmp_path, GroupLimits(2 * GIB, GIB // 2, None))
    assert (bound.total_bytes, bound.available_bytes) == (2 * GIB, GIB // 2)


def test_this_machine_is_found() -> None:
    device = detect_cpu()
    assert device.kind == "cpu"
    assert 0 < device.available_bytes <= device.total_bytes
    assert device.cores >= 1


@pytest.mark.parametrize("group", [None, GIB])
def test_pinned_memory_is_limited_by_the_group_and_not_by_what_a_process_may_lock(
    group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, 8 << 20))
    limits = GroupLimits(group, group, None)
    assert pinnable_bytes(limits) == detect_cpu(limits=limits).pinnable_bytes == group


@pytest.mark.parametrize("text", [None, "", "MemTotal:\n", "MemTotal: much kB\n"])
def test_without_a_readable_meminfo_the_system_is_asked(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    found = detect_cpu(tmp_path, UNLIMITED)
    assert found.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.available_bytes == found.total_bytes


def test_no_more_is_available_than_there_is(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 200 kB\n")
    assert detect_cpu(tmp_path, UNLIMITED).available_bytes == 100 * KIB


@pytest.mark.parametrize(
    ("name", "torchs"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("hip:0", "cuda:0")]
)
def test_torch_calls_the_gpus_of_amd_cuda_too(name: str, torchs: str) -> None:
    assert torch_name(name) == torchs


def test_devices_without_host_memory_behind_them_hold_everything() -> None:
    def device(**given: object) -> DeviceSpec:
        values = {"name": "x", "kind": "cuda", "total_bytes": 1, "available_bytes": 1}
        return DeviceSpec(**(values | given))  # type: ignore[arg-type]

    assert not device().holds_all
    assert device(kind="cpu").holds_all
    assert device(unified=True).holds_all
