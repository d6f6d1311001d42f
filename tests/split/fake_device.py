"""A device stage in host memory: a made-up model, and captured steps that simply run again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headroom.engine.engine import Engine
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.batch import Batch, GpuBatch
from headroom.layers.draws import DeviceSampler
from headroom.plan.settings import PlanSettings
from headroom.split.gpu_stage import Captured, GpuStage
from headroom.split.pipeline import Pipeline
from headroom.split.stage import CpuStage
from headroom.split.step_inputs import StepKind

VOCAB, HIDDEN = 300, 16


def settings(**changed: int) -> PlanSettings:
    """Small settings, float32 throughout."""
    sizes = {"context": 512, "parallel": 4, "chunk": 64, "cache_tokens": 2048} | changed
    return PlanSettings(
        **sizes, k_type="f32", v_type="f32", compute_type="f32", weights="packed",
        threads=1, kernels="cuda",
    )  # fmt: skip


class FakeModel:
    """Logits that depend on a row's token and position, and on nothing else."""

    routing = None
    cold = None
    to_compile = frozenset()

    def __init__(self, capturable: bool = True) -> None:
        self.capturable = capturable
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._positions = torch.randn(4096, HIDDEN, generator=generator)
        self._head = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.seen: list[GpuBatch] = []

    def run(self, batch: Batch) -> torch.Tensor:
        """Return rows that tell their tokens and positions."""
        if isinstance(batch, GpuBatch):
            self.seen.append(batch)
        return self._tokens[batch.tokens] + self._positions[batch.positions.long()]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the rows whose logits are wanted."""
        return self.run(batch)[batch.output_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, each row alone, so that batches have the same bits."""
        return torch.cat([row[None] @ self._head for row in hidden]) if len(hidden) else hidden


@dataclass
class Again:
    """A graph that runs what it was made of."""

    run: Callable[[], object]

    def replay(self) -> None:
        """Run it once more."""
        self.run()


class FakeStage(GpuStage):
    """A device stage without a device."""

    def __init__(self, model: FakeModel, plan: PlanSettings) -> None:
        sampler = DeviceSampler.allocate(DECODE_ROWS, VOCAB, "cpu")
        super().__init__("cpu", model, plan, frozenset(), sampler)  # type: ignore[arg-type]
        self.kinds: list[StepKind] = []

    def _capture(self, kind: StepKind) -> Captured:
        self._captured_inputs.clear()
        self._run_captured(kind)  # as a warm-up does, which draws
        self.kinds.append(kind)
        hidden = torch.empty(kind.rows, HIDDEN)
        logits = torch.empty(kind.rows, VOCAB)

        def run() -> None:
            found, scores = self._run_captured(kind)
            hidden.copy_(found)
            logits.copy_(scores)

        return Captured(Again(run), hidden, logits)


def device_engine(model: FakeModel, plan: PlanSettings) -> tuple[Engine, FakeStage]:
    """An engine whose stage draws."""
    stage = FakeStage(model, plan)
    stage.capture()
    return Engine(Pipeline(stage, VOCAB, {}), plan, queue=64), stage


def host_engine(model: FakeModel, plan: PlanSettings) -> Engine:
    """An engine that draws itself."""
    return Engine(Pipeline(CpuStage("cpu", model), VOCAB, {}), plan, queue=64)  # type: ignore[arg-type]
