"""Timeline: kernels of a GPU in their order, sorted into the parts of a step by markers."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from headroom.errors import HeadroomError
from headroom.layers.step_timing import MARKER, STEP

_MARKED = re.compile(rf"\b{MARKER}(\w+)")
_OVER_LINK = re.compile(r"Memcpy (HtoD|DtoH)")  # as the profiler calls them


@dataclass(frozen=True, slots=True)
class KernelTime:
    """When one kernel or copy ran, in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PartTimes:
    """The mean over some steps, in seconds."""

    steps: int
    step_s: float  # from the start of one to the start of the next
    parts: dict[str, float]
    kernels: dict[str, dict[str, float]]  # by part: its kernels, the longest first; on a GPU
    kernel_s: float = 0.0  # in which a GPU ran any kernel
    link_s: float = 0.0  # in which anything was copied between it and the host

    @property
    def busy_s(self) -> float:
        """What all parts took together."""
        return sum(self.parts.values())


def marked(name: str) -> str:
    """Return what a kernel marks; nothing for one that works. Some tools write `void name()`."""
    found = _MARKED.search(name)
    return found[1] if found else ""


def part_times(timeline: Sequence[KernelTime], chosen: slice) -> PartTimes:
    """Return the parts of some of the whole steps; the last one has no end.

    Where kernels overlap, the time is the earlier one's, so that all parts together are what the
    GPU was busy for.
    """
    kernels = sorted(timeline, key=lambda kernel: kernel.start)
    begins = [index for index, kernel in enumerate(kernels) if marked(kernel.name) == STEP]
    whole = list(itertools.pairwise(begins))[chosen]
    if not whole:
        raise HeadroomError(
            f"The profiler saw {len(kernels)} kernels and {len(begins)} starts of steps.",
            hint="Leave out the parts of a step: --no-parts.",
        )
    first, end, count = whole[0][0], whole[-1][1], len(whole)
    by_part: dict[str, dict[str, float]] = {}
    part, done = "other", kernels[first].end
    for kernel in kernels[first:end]:
        if marker := marked(kernel.name):
            part = "other" if marker == STEP else marker
        else:
            own = max(0.0, kernel.end - max(kernel.start, done))
            names = by_part.setdefault(part, {})
            names[kernel.name] = names.get(kernel.name, 0.0) + own
        done = max(done, kernel.end)
    working = [kernel for kernel in kernels[first:end] if not marked(kernel.name)]
    over_link = [kernel for kernel in working if _OVER_LINK.match(kernel.name)]
    return PartTimes(
        steps=count,
        step_s=(kernels[end].start - kernels[first].start) / count,
        parts={part: sum(names.values()) / count for part, names in by_part.items()},
        kernels={
            part: {name: names[name] / count for name in sorted(names, key=lambda x: -names[x])}
            for part, names in by_part.items()
        },
        kernel_s=covered([x for x in working if not _OVER_LINK.match(x.name)]) / count,
        link_s=covered(over_link) / count,
    )


def covered(kernels: Sequence[KernelTime]) -> float:
    """Return the time in which any of some kernels ran; they are in the order of their starts."""
    total, done = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, done))
        done = max(done, kernel.end)
    return total
