"""The counters of an engine, and EngineStats, a snapshot of them."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headroom.engine.pages import PagePool
from headroom.engine.prefixes import PrefixCounts
from headroom.engine.scheduler import Scheduler
from headroom.split.pipeline import DeviceMemory
from headroom.split.stage_times import StageTimes, StepParts
from headroom.split.upkeep import ExpertTelemetry

# DeviceMemory and ExpertTelemetry are also exported here, for users of EngineStats.
__all__ = ["Counters", "DeviceMemory", "EngineStats", "ExpertTelemetry"]

NO_PREFIXES = PrefixCounts(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine is doing and has done since it started."""

    requests_running: int
    requests_waiting: int
    requests_finished: Mapping[str, int]  # by finish reason
    prompt_tokens: int  # computed in prefill, also when a preempted prompt is computed again
    generated_tokens: int
    steps: int
    step_s: float  # seconds spent in steps
    preemptions: int
    cache_pages_used: int
    cache_pages_total: int
    started_at: float  # seconds since the epoch
    memory: Sequence[DeviceMemory]  # of this engine, one for each device
    experts: ExpertTelemetry | None = None  # as of the last request's end; None: not counted
    stages: Sequence[tuple[str, StageTimes]] = ()  # by device; empty if there is one stage
    parts: StepParts | None = None  # of all steps; None if a GPU runs layers
    prefixes: PrefixCounts = NO_PREFIXES
    guessed_tokens: int = 0  # by a drafter
    accepted_tokens: int = 0  # guesses that were right
    held_back_tokens: int = 0  # guesses that were not checked, since that would not have paid


@dataclass(slots=True)
class Counters:
    """The counters of a running engine; only the engine thread changes them."""

    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    held_back_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    sampling_s: float = 0.0  # drawing tokens on the host; part of `step_s`
    started_at: float = field(default_factory=time.time)

    @property
    def tokens(self) -> int:
        """Prompt tokens and generated tokens."""
        return self.prompt_tokens + self.generated_tokens

    def snapshot(
        self,
        scheduler: Scheduler,
        pool: PagePool,
        live: int,
        memory: Sequence[DeviceMemory],
        experts: ExpertTelemetry | None = None,
        stages: Sequence[tuple[str, StageTimes]] = (),
        prefixes: PrefixCounts = NO_PREFIXES,
        parts: StepParts | None = None,
    ) -> EngineStats:
        """Return the counters as they are now; `live` is the number of requests not ended."""
        running = len(scheduler.running)
        return EngineStats(
            requests_running=running,
            requests_waiting=max(0, live - running),
            requests_finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            guessed_tokens=self.guessed_tokens,
            accepted_tokens=self.accepted_tokens,
            held_back_tokens=self.held_back_tokens,
            steps=self.steps,
            step_s=self.step_s,
            preemptions=scheduler.preemptions,
            cache_pages_used=pool.used,
            cache_pages_total=pool.total,
            started_at=self.started_at,
            memory=memory,
            experts=experts,
            stages=stages,
            parts=parts,
            prefixes=prefixes,
        )
