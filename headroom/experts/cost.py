"""Cost of a layer's cold experts: read by the GPU, computed by the CPU, or shared between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

from headroom.plan.cold_speeds import ColdSpeeds

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
