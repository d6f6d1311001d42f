"""Limits of control groups, read from made-up folders."""

from pathlib import Path

from headroom.machine.cgroups import GroupLimits, read_limits
from headroom.units import GIB


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_version_2_limits_are_the_smallest_on_the_way_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "proc", {"self/cgroup": "0::/outer/inner\n"})
    write(
        tmp_path / "sys",
        {
            "outer/memory.max": f"{4 * GIB}\n",
            "outer/memory.current": f"{3 * GIB}\n",
            "outer/memory.stat": f"anon {2 * GIB}\ninactive_file {1 * GIB}\n",
            "outer/inner/memory.max": "max\n",
            "outer/inner/memory.current": "5\n",
            "outer/inner/cpu.max": "150000 100000\n",
        },
    )
    limits = read_limits(tmp_path / "proc", tmp_path / "sys")
    assert limits == GroupLimits(4 * GIB, 2 * GIB, 1.5)


def test_version_1_limits_are_read_by_controller(tmp_path: Path) -> None:
    rows = "3:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n"
    write(tmp_path / "proc", {"self/cgroup": rows})
    write(
        tmp_path / "sys",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "cpu/job/cpu.cfs_quota_us": "50000\n",
            "cpu/job/cpu.cfs_period_us": "100000\n",
        },
    )
    limits = read_limits(tmp_path / "proc", tmp_path / "sys")
    assert limits == GroupLimits(2 * GIB, GIB, 0.5)


def test_a_path_outside_the_mount_falls_back_to_the_mount(tmp_path: Path) -> None:
    write(tmp_path / "proc", {"self/cgroup": "0::/not/here\n"})
    write(tmp_path / "sys", {"memory.max": f"{GIB}\n", "memory.current": "0\n"})
    assert read_limits(tmp_path / "proc", tmp_path / "sys").memory_bytes == GIB


def test_no_groups_mean_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path, tmp_path) == GroupLimits(None, None, None)
