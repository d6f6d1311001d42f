"""A stage on the stand-in GPU, whose model is computed from tables."""

import torch

from headroom.engine.engine import Engine
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.batch import Batch, GpuBatch
from headroom.layers.cache import StageCaches
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


class TableModel:
    """Logits that depend on a row's token and position, and on nothing else."""

    has_head = True
    routing = None
    tap = None
    store = None
    cold_experts = None
    decode_worker = None
    embed_s = 0.0
    caches = StageCaches((), (), 0, pin=False)

    def __init__(self, capturable: bool = True) -> None:
        self.capturable = capturable
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._positions = torch.randn(4096, HIDDEN, generator=generator)
        self._head = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.seen: list[GpuBatch] = []

    def move(self, device: str) -> None:
        """Bring the tables to a device."""
        self._tokens, self._positions, self._head = (
            table.to(device) for table in (self._tokens, self._positions, self._head)
        )

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

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows with their values in reverse order."""
        return hidden.flip(1)


class NotedStage(GpuStage):
    """A stage on the stand-in GPU that notes which kinds of steps it captures."""

    def __init__(self, model: TableModel, plan: PlanSettings) -> None:
        model.move("cuda:0")
        sampler = DeviceSampler.allocate(DECODE_ROWS, VOCAB, "cuda:0")
        super().__init__("cuda:0", model, plan, frozenset(), sampler)  # type: ignore[arg-type]
        self.kinds: list[StepKind] = []

    def _capture(self, kind: StepKind) -> Captured:
        self.kinds.append(kind)
        return super()._capture(kind)


def device_engine(model: TableModel, plan: PlanSettings) -> tuple[Engine, NotedStage]:
    """Return an engine whose stage, on the stand-in GPU, draws the tokens."""
    stage = NotedStage(model, plan)
    stage.capture()
    return Engine(Pipeline([stage], VOCAB), plan, queue=64), stage


def host_engine(model: TableModel, plan: PlanSettings) -> Engine:
    """Return an engine that computes on the CPU and draws the tokens itself."""
    return Engine(Pipeline([CpuStage("cpu", model)], VOCAB), plan, queue=64)  # type: ignore[arg-type]
