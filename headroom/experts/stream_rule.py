"""What becomes of a layer's cold experts in a step of many rows: streamed, left to the CPU, or
passed over; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

# What the estimates below go by was measured by tests/gpu/cold_phases.py on an H200 with 16 cores
# beside it, 2026-11-16, with the experts of one layer of Qwen3.5-35B-A3B and 32 to 512 rows.
HAND_OVER_S = 300e-6  # rows to the CPU and its answers back
# What a CPU reaches beside copies that read the same memory, of what calibrate measures alone:
# 59 to 79 GB/s of 77 to 88, and with several picks an expert 450 to 580 GFLOP/s of 725 to 793.
READ_SHARE = 0.8
FLOPS_SHARE = 0.6
# What it costs to hear which experts were chosen. To wait for the GPU and read from it:
READ_BACK_S = 30e-6
# The host's own time to say what is copied, while which nothing is: 1.1 to 2 ms.
PREPARE_S = 1.2e-3
# A row in all parts of a layer but experts, while which copies go on if they did not have to wait
# for the router: prompts of 512 rows of Qwen3.5-35B-A3B, all experts hot, took 0.72 ms a layer
# 2026-11 on an H200, and experts 0.36 of that.
BESIDE_ROW_S = 0.7e-6
WORTH = 0.8  # of the time without counting: less is gained than the estimate may be wrong by
MOST_ROWS = 1 << 16  # of a step
MOST_MEAN_PICKS = 700.0  # that chance is reckoned for; with so many no CPU is as quick as a copy


@dataclass(frozen=True, slots=True)
class ColdRates:
    """How fast cold experts are worked off on either side."""

    link: float  # bytes/s of copies to the GPU
    cpu_bandwidth: float = 0.0  # bytes/s at which the CPU reads experts; 0: it is not asked
    cpu_flops: float = 0.0  # of its products, at the type that it computes in

    @property
    def asks_cpu(self) -> bool:
        """Whether experts may be left to the CPU."""
        return self.cpu_bandwidth > 0 and self.cpu_flops > 0

    @property
    def without_cpu(self) -> "ColdRates":
        """The same where nothing is left to the CPU."""
        return ColdRates(self.link)


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """What one expert weighs and works."""

    bytes: int
    flops: int  # of one pick


def expert_flops(width: int, hidden: int) -> int:
    """Return the operations of one pick: three products, each value multiplied and added."""
    return 6 * width * hidden


@dataclass(frozen=True, slots=True)
class ColdLayer:
    """The cold experts of a layer, and what is expected of them."""

    size: ExpertSize
    experts: int  # that are cold
    picks: float  # of them by a row
    ahead_bytes: int  # that could come before the layer is reached: the buffers


def most_counted_rows(layer: ColdLayer, rates: ColdRates) -> int:
    """Return the most rows of a step that should wait to hear which experts were chosen."""
    low, high = 0, MOST_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if pays_to_count(middle, layer, rates):
            low = middle
        else:
            high = middle - 1
    return low


def pays_to_count(rows: int, layer: ColdLayer, rates: ColdRates) -> bool:
    """Tell whether a step should wait to hear which experts were chosen, before it copies any.

    Without waiting all cold experts are copied, from the time on when the layer before works. With
    it the unused ones are not, and the CPU takes those that `left_to_cpu` gives it. Against that
    stand the read-back, what the host does then, and the copies that could have run meanwhile: no
    copy of this layer begins before its router is done.

    Left out: cold experts are taken to differ in their picks by chance alone, and where some are
    chosen far less than others counting is worth more; a GPU that computes for longer than copies
    take gains nothing by fewer of them; kernels launched ahead are used up while the host waits.
    """
    counts = expected_counts(rows * layer.picks, layer.experts)
    counted_s = _shared(counts, layer.size, rates)[1]
    lost_s = min(rows * BESIDE_ROW_S, layer.ahead_bytes / rates.link)
    all_s = layer.experts * layer.size.bytes / rates.link
    return READ_BACK_S + PREPARE_S + lost_s + counted_s < WORTH * all_s


def expected_counts(picks: float, experts: int) -> dict[int, int]:
    """Return how many of some picks each expert gets if chance alone decides, fewest first.

    They are the numbers that stand in the middle of so many equal shares of a Poisson
    distribution; all together may be a few more or less than the picks.
    """
    mean = min(picks / max(1, experts), MOST_MEAN_PICKS)
    counts: dict[int, int] = {}
    count, chance = 0, exp(-mean)
    reached = chance
    for expert in range(experts):
        while reached < (expert + 0.5) / experts and chance:
            count += 1
            chance *= mean / count
            reached += chance
        counts[expert] = count
    return counts


def left_to_cpu(counts: Mapping[int, int], size: ExpertSize, rates: ColdRates) -> frozenset[int]:
    """Return the cold experts, of those chosen, that the CPU should compute.

    `counts`: picks by cold expert. Those with the fewest picks go first, as many as make the
    slower of link and CPU finish soonest; both work at the same time.
    """
    return _shared(counts, size, rates)[0]


def _shared(
    counts: Mapping[int, int], size: ExpertSize, rates: ColdRates
) -> tuple[frozenset[int], float]:
    """The experts that the CPU should compute, and when both sides are done."""
    chosen = sorted((count, expert) for expert, count in counts.items() if count)
    link_s = size.bytes / rates.link
    best, best_s = 0, len(chosen) * link_s
    if not rates.asks_cpu:
        return frozenset(), best_s
    read_s = size.bytes / (READ_SHARE * rates.cpu_bandwidth)
    pick_s = size.flops / (FLOPS_SHARE * rates.cpu_flops)
    cpu_s = HAND_OVER_S
    for taken, (count, _) in enumerate(chosen, 1):
        cpu_s += max(read_s, count * pick_s)
        if cpu_s >= best_s:
            break  # more of them take longer still
        slower = max(cpu_s, (len(chosen) - taken) * link_s)
        if slower < best_s:
            best, best_s = taken, slower
    return frozenset(expert for _, expert in chosen[:best]), best_s


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
