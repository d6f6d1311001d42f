"""Counters of an engine, and a snapshot of them for whoever asks."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headroom.engine.pages import PagePool
from headroom.engine.scheduler import Scheduler
from headroom.split.pipeline import DeviceMemory
from headroom.split.upkeep import ExpertTelemetry

# The memory is the pipeline's own report, the experts' figures are their upkeep's.
__all__ = ["Counters", "DeviceMemory", "EngineStats", "ExpertTelemetry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine is doing and has done since it started."""

    requests_running: int
    requests_waiting: int
    requests_finished: Mapping[str, int]  # by finish reason
    prompt_tokens: int  # read before first tokens; again where a preempted prompt starts anew
    generated_tokens: int
    steps: int
    step_s: float  # spent in steps
    preemptions: int
    cache_pages_used: int
    cache_pages_total: int
    started_at: float  # seconds since the epoch
    memory: DeviceMemory
    experts: ExpertTelemetry | None = None  # at the last request's end; None where not watched


@dataclass(slots=True)
class Counters:
    """The running totals; only the engine thread changes them."""

    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    started_at: float = field(default_factory=time.time)

    @property
    def tokens(self) -> int:
        """Tokens read and generated."""
        return self.prompt_tokens + self.generated_tokens

    def snapshot(
        self,
        scheduler: Scheduler,
        pool: PagePool,
        live: int,
        memory: DeviceMemory,
        experts: ExpertTelemetry | None = None,
    ) -> EngineStats:
        """Return the totals as they are now; `live` requests have not ended yet."""
        running = len(scheduler.running)
        return EngineStats(
            requests_running=running,
            requests_waiting=max(0, live - running),
            requests_finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            steps=self.steps,
            step_s=self.step_s,
            preemptions=scheduler.preemptions,
            cache_pages_used=pool.used,
            cache_pages_total=pool.total,
            started_at=self.started_at,
            memory=memory,
            experts=experts,
        )
