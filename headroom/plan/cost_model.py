"""ColdSpeeds: how fast a machine works off experts that are not in GPU memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, exp
from typing import Literal

from headroom.machine.devices import LISTED_SHARE, DeviceSpec

ASSUMED_HANDOVER_S = 10e-6  # until the machine is measured
# Until then, too: of the speed of large plain products, what a CPU's expert kernels reach on tiles
# of four bits with eight rows each. 26 of 144 GFLOP/s of one core, once, beside other work.
EXPERTS_SHARE = 0.2

Worker = Literal["link", "cpu", "both"]  # who is busy with cold experts


@dataclass(frozen=True, slots=True)
class ColdSpeeds:
    """What a machine reaches with experts, in bytes per second, and how quick an answer is."""

    gpu: float  # of the GPU's own memory
    link: float  # kernels of the GPU that read host memory; 0: they cannot
    cpu: float  # the CPU's expert kernels on host memory; 0: there are none
    handover_s: float  # an empty request of the CPU and its answer
    copy: float = 0.0  # copies from host memory to the GPU
    cpu_flops: float = 0.0  # operations per second of the CPU's expert kernels, some rows each
    measured: bool = False  # on this machine, by headroom calibrate


def speeds_of(gpu: DeviceSpec, host: DeviceSpec) -> ColdSpeeds:
    """Return what was measured, and what is to be expected where it was not."""
    device_share = 1.0 if gpu.measured else LISTED_SHARE
    host_share = 1.0 if host.measured else LISTED_SHARE
    copy = gpu.link * device_share
    experts = host.experts or host.bandwidth * host_share
    return ColdSpeeds(
        gpu=gpu.bandwidth * device_share,
        link=gpu.link_read or copy,
        cpu=experts if host.native else 0.0,
        handover_s=gpu.handover_s or ASSUMED_HANDOVER_S,
        copy=copy,
        cpu_flops=host.expert_flops or EXPERTS_SHARE * host.flops * host_share,
        measured=bool(gpu.link_read and host.experts),
    )


def usable_speeds(speeds: ColdSpeeds, cold: str, pinned: bool) -> ColdSpeeds:
    """Return the speeds of those who may compute cold experts in small steps, 0 of the others."""
    link = speeds.link if pinned and cold != "cpu" else 0.0
    return replace(speeds, link=link, cpu=0.0 if cold == "gpu" else speeds.cpu)


def layer_seconds(speeds: ColdSpeeds, cold_bytes: float) -> tuple[Worker, float]:
    """Return who works off a layer's cold experts in a step of one row, and how long.

    Both work at once, so that their rates add up from the time when the CPU was reached.
    """
    if not speeds.cpu:
        return "link", cold_bytes / (speeds.link or speeds.copy)
    if not speeds.link:
        return "cpu", speeds.handover_s + cold_bytes / speeds.cpu
    alone = cold_bytes / speeds.link
    if alone <= speeds.handover_s:
        return "link", alone
    reached = speeds.cpu * speeds.handover_s
    return "both", (cold_bytes + reached) / (speeds.link + speeds.cpu)


ColdPath = Literal["gpu", "cpu", "drop"]  # who computes cold experts in small steps, if anybody

KERNELS_S = 4e-6  # of the two kernels that ask the CPU and take its answers, whatever they carry
# Of a GPU's kernels while the CPU works, before any cold expert: shared and hot ones of one row.
# Of a layer of Qwen3.5-35B-A3B 17 us were measured 2026-11 on an H200, with copies of ids and rows
# around them that no step makes: less is counted, an estimate.
OWN_S = 12e-6


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes a layer's cold picks."""

    path: ColdPath
    left: tuple[int, ...]  # of so many cold picks of a row, those that the GPU reads in place


def row_seconds(speeds: ColdSpeeds, expert_bytes: int, hot: int, cold: int, left: int) -> float:
    """Return the time of one row's experts when the GPU takes `left` of the cold ones."""
    asked = cold - left
    if (asked and not speeds.cpu) or (left and not speeds.link):
        return float("inf")
    gpu_s = OWN_S + hot * expert_bytes / speeds.gpu
    if left:
        gpu_s += left * expert_bytes / speeds.link
    cpu_s = speeds.handover_s + asked * expert_bytes / speeds.cpu if asked else 0.0
    return max(gpu_s, cpu_s)


def best_left(speeds: ColdSpeeds, expert_bytes: int, used: int) -> tuple[int, ...]:
    """Return for 0, 1, ... `used` cold picks of a row how many of them the GPU should read."""
    return tuple(
        min(
            range(cold + 1),
            key=lambda left: row_seconds(speeds, expert_bytes, used - cold, cold, left),
        )
        for cold in range(used + 1)
    )


def expected_seconds(
    speeds: ColdSpeeds, expert_bytes: int, hit_rate: float, left: Sequence[int]
) -> float:
    """Return the expected time of one row's experts, each pick hot with probability `hit_rate`."""
    used = len(left) - 1
    chances = (
        comb(used, cold) * (1 - hit_rate) ** cold * hit_rate ** (used - cold)
        for cold in range(used + 1)
    )
    return sum(
        chance * row_seconds(speeds, expert_bytes, used - cold, cold, left[cold])
        for cold, chance in enumerate(chances)
        if chance
    )


def choose(speeds: ColdSpeeds, expert_bytes: int, used: int, hit_rate: float) -> Choice:
    """Return the quickest way for a layer: all by the GPU, or the CPU with the GPU's help."""
    everything = tuple(range(used + 1))
    by_gpu = expected_seconds(speeds, expert_bytes, hit_rate, everything)
    shared = best_left(speeds, expert_bytes, used)
    by_both = KERNELS_S + expected_seconds(speeds, expert_bytes, hit_rate, shared)
    if by_both < by_gpu:
        return Choice("cpu", shared)
    return Choice("gpu", everything)


def forced(path: ColdPath, used: int) -> Choice:
    """Return a path that was asked for, all cold picks by it."""
    return Choice(path, tuple(range(used + 1)) if path == "gpu" else (0,) * (used + 1))


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
