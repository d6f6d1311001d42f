"""Limits of the control groups (version 1 and 2) that this process lives in."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes "no limit" as the largest number of whole pages.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the groups allow; None where nothing is limited."""

    memory_bytes: int | None  # the smallest limit of any group from this one up to the root
    # What is left of the limit that has least left; file cache that may be dropped counts as free.
    available_bytes: int | None
    cores: float | None  # share of processor time, in cores


def read_limits(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> GroupLimits:
    """Read the limits of this process's groups and of all groups around them."""
    limits, available, cores = [], [], []
    for folder in _folders(proc, root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        limits.append(limit)
        available.append(max(0, limit - max(0, used - _droppable(folder))))
    for folder in _folders(proc, root, "cpu"):
        if (share := _cores(folder)) is not None:
            cores.append(share)
    return GroupLimits(
        min(limits, default=None), min(available, default=None), min(cores, default=None)
    )


def _folders(proc: Path, root: Path, controller: str) -> Iterator[Path]:
    """Yield the group folders of a controller, from the process's own up to the root."""
    try:
        rows = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for row in rows:
        _, controllers, path = row.split(":", 2)
        if controllers == "":
            mounts = [root, root / "unified"]  # version 2, alone or beside version 1
        elif controller in controllers.split(","):
            mounts = [root / controller, root / controllers]
        else:
            continue
        for mount in mounts:
            inner = PurePosixPath(path.lstrip("/"))
            for part in (inner, *inner.parents):
                if (mount / part).is_dir():
                    yield mount / part


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _droppable(folder: Path) -> int:
    """Return the file cache that counts as used by a group and that the kernel drops on demand."""
    try:
        rows = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _cores(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = (
        _number(folder / "cpu.cfs_quota_us"),
        _number(folder / "cpu.cfs_period_us"),
    )
    if quota_us is None or quota_us <= 0 or not period_us:
        return None
    return quota_us / period_us
