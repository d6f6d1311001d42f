"""What becomes of a layer's cold experts in a step of many rows: streamed, left to the CPU, or
passed over; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Picks of a mean expert, hot or cold, below which it pays to wait for the numbers of picks: without
# a CPU there are only unused experts to pass over, of which three picks each leave one in twenty.
COUNTED_PICKS = 3
COUNTED_PICKS_CPU = 8
HAND_OVER_S = 300e-6  # rows to the CPU and its answers back


@dataclass(frozen=True, slots=True)
class ColdRates:
    """How fast cold experts are worked off on either side."""

    link: float  # bytes/s of copies to the GPU
    cpu_bandwidth: float  # bytes/s at which the CPU reads experts
    cpu_flops: float  # of its products, at the type that it computes in


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """What one expert weighs and works."""

    bytes: int
    flops: int  # of one pick


def expert_flops(width: int, hidden: int) -> int:
    """Return the operations of one pick: three products, each value multiplied and added."""
    return 6 * width * hidden


def pays_to_count(picks: int, experts: int, with_cpu: bool) -> bool:
    """Tell whether a step is so small that it should wait to hear which experts were chosen."""
    return picks < experts * (COUNTED_PICKS_CPU if with_cpu else COUNTED_PICKS)


def left_to_cpu(
    counts: Mapping[int, int], size: ExpertSize, rates: ColdRates | None
) -> frozenset[int]:
    """Return the cold experts, of those chosen, that the CPU should compute.

    `counts`: picks by cold expert. Those with the fewest picks go first, as many as make the
    slower of link and CPU finish soonest; both work at the same time.
    """
    if rates is None:
        return frozenset()
    chosen = sorted((count, expert) for expert, count in counts.items() if count)
    best, best_s = 0, len(chosen) * size.bytes / rates.link
    cpu_s = HAND_OVER_S
    for taken, (count, _) in enumerate(chosen, 1):
        cpu_s += max(size.bytes / rates.cpu_bandwidth, count * size.flops / rates.cpu_flops)
        slower = max(cpu_s, (len(chosen) - taken) * size.bytes / rates.link)
        if slower < best_s:
            best, best_s = taken, slower
    return frozenset(expert for _, expert in chosen[:best])


def cut_pieces(rows: Sequence[int], most: int) -> list[list[int]]:
    """Cut rows of cold memory, in ascending order, into pieces of at most so many."""
    ordered = sorted(rows)
    return [ordered[first : first + most] for first in range(0, len(ordered), most)]


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and end of the neighbours among ascending rows: each is one copy."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found
