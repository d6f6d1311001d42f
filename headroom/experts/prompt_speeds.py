"""PromptSpeeds: how fast the CPU and the link are now, for the cold experts of prefill steps.

The prefill rule divides the cold experts of a step between copies over the link and the CPU by the
speeds of both. They start as calibrated. Each part that the CPU computed and each copy that was
timed says how much slower they are than predicted. What decode steps learn about the CPU meanwhile
(`experts/controller.py`) counts, too. It holds no tensors.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from headroom.experts.controller import Trend, trend_from
from headroom.plan.cost_model import ColdSpeeds

# The time constants of the smoothing (controller.py) are in seconds, and readings come one for each
# layer or large copy, tens in a prompt. Each counts as if the speed had been seen for this long.
READING_S = 0.1
# If the CPU got nothing for so long, one layer of a step leaves it one expert.
PROBE_EVERY_S = 1.0
LEAST_COPY_BYTES = 1 << 20  # the start of a smaller copy takes a good part of its time


class PromptSpeeds:
    """The speeds of one GPU and its CPU for prefill steps; only the engine's thread uses it."""

    def __init__(
        self,
        start: ColdSpeeds,
        *,
        follows: bool,  # whether measurements count; else the speeds stay as they are
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start, self._clock = start, clock
        self._follows = follows and start.cpu_takes_prefill
        self._cpu, self._copy = trend_from(1.0), trend_from(1.0)  # times the predicted time
        # The CPU's pace in decode steps, and what it was when the CPU's part was last measured.
        self.decode_pace: Callable[[], float] = lambda: 1.0
        self._pace_seen = 1.0
        self._cpu_seen_s = clock()

    @property
    def cpu_takes_prefill(self) -> bool:
        """Whether the CPU may compute experts in prefill steps."""
        return self.start.cpu_takes_prefill

    @property
    def cpu_pace(self) -> float:
        """How fast the CPU computes now, as a share of what was calibrated."""
        return 1.0 / self._cpu_slower

    @property
    def link_pace(self) -> float:
        """How fast copies are now, as a share of what was calibrated."""
        return 1.0 / self._copy.value

    @property
    def now(self) -> ColdSpeeds:
        """The speeds as they are now."""
        if not self._follows:
            return self.start
        slower, start = self._cpu_slower, self.start
        return replace(
            start,
            cpu=start.cpu / slower,
            cpu_flops=start.cpu_flops / slower,
            copy=start.copy / self._copy.value,
        )

    @property
    def probe_due(self) -> bool:
        """Whether a layer should leave the CPU an expert although it is slower than copies."""
        return self._follows and self._clock() - self._cpu_seen_s >= PROBE_EVERY_S

    def cpu_took(self, predicted_s: float, took_s: float) -> None:
        """Learn from a part that the CPU computed; `predicted_s` is by the speeds at the start."""
        if not self._follows or predicted_s <= 0:
            return
        self._cpu.value = self._cpu_slower
        _follow(self._cpu, took_s / predicted_s)
        self._pace_seen, self._cpu_seen_s = self.decode_pace(), self._clock()

    def copied(self, size_bytes: int, took_s: float) -> None:
        """Learn from a copy that was timed."""
        if self._follows and size_bytes >= LEAST_COPY_BYTES:
            _follow(self._copy, took_s * self.start.copy / size_bytes)

    @property
    def _cpu_slower(self) -> float:
        """How many times its calibrated time the CPU takes now."""
        trend = self._cpu
        since = self._pace_seen / self.decode_pace()
        return min(max(trend.value * since, trend.least), trend.most)


def _follow(trend: Trend, seen: float) -> None:
    trend.follow(seen, READING_S)
