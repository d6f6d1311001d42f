"""The CPUs of this machine that threads should run on: one of each physical core."""

from collections.abc import Collection
from pathlib import Path

SYS_DEVICES = Path("/sys/devices")


def physical_cores(cpus: Collection[int], root: Path = SYS_DEVICES) -> list[int]:
    """Return one of `cpus` for each physical core, in order of their numbers.

    Two threads of one core share its arithmetic units and gain nothing in products. Of CPUs with
    fast and slow cores (Intel's hybrid ones) only the fast ones count, unless there are none among
    `cpus`: all threads would wait for the slow ones. Where the system tells nothing, every CPU is a
    core.
    """
    fast = _numbers(root / "cpu_core" / "cpus") & set(cpus)
    seen: set[int] = set()
    cores = []
    for cpu in sorted(fast or cpus):
        if cpu in seen:
            continue
        cores.append(cpu)
        topology = root / "system" / "cpu" / f"cpu{cpu}" / "topology"
        seen |= _numbers(topology / "thread_siblings_list")
    return cores


def _numbers(path: Path) -> set[int]:
    """Return the numbers of a list such as 0-3,8; none where the file is missing."""
    try:
        parts = path.read_text().strip().split(",")
        ranges = [[int(end) for end in part.split("-")] for part in parts if part]
    except (OSError, ValueError):
        return set()
    return {number for ends in ranges for number in range(ends[0], ends[-1] + 1)}
