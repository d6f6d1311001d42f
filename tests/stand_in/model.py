"""Models on the stand-in GPU, step by step and without captured graphs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.experts.placement import ExpertPlacement
from headroom.experts.traces.taps import RouterTap
from headroom.families.config import AttentionConfig
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels.ops import StepTables
from headroom.layers.batch import Batch, GpuBatch
from headroom.layers.cache import KvPages
from headroom.machine.devices import DeviceSpec, detect_cpu
from headroom.options import Options
from headroom.plan.describe import ModelDescription, describe
from headroom.plan.plan import Plan, make_plan
from headroom.split.build import load_model
from tests.running import PAGE_SIZE, running
from tests.stand_in.gpu import H200

GPU = H200.spec


class ModelOnGpu:
    """A model whose tensors lie on the stand-in GPU."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        gpu: DeviceSpec = GPU,
        tap: RouterTap | None = None,
        **settings: object,
    ) -> None:
        given = {"context": 256, "parallel": 4, "kv_type": "f32", "dtype": "f32"} | settings
        self.options = options = Options(device="cuda:0", **given)  # type: ignore[arg-type]
        self.described = model = describe(checkpoint)
        host = replace(detect_cpu(), name="host", runs_layers=False)
        self.plan = make_plan([model.shape], [gpu, host], options)
        tensors = model.checkpoint.tensors
        self.counted: Counter[str] = Counter()
        self.model = load_model(
            model.config,
            tensors,
            self.plan,
            self.plan.devices[0],
            self._count,
            _some_hot(self.plan),
            tap,
        )
        self.rings = _rings(model, self.plan)

    @property
    def planned(self) -> dict[str, int]:
        """The bytes that the plan has on the GPU and in host memory, by the name of the line."""
        lines = (*self.plan.devices[0].lines, *self.plan.host.lines)
        sizes: Counter[str] = Counter()
        for line in lines:  # a table may be in both memories
            sizes[line.name] += line.bytes
        return sizes

    def _count(self, line: str, size: int) -> None:
        self.counted[line] += size

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Run a step; return the residual stream of its output rows."""
        x = self.model.run(self._there(batch))
        return x.index_select(0, batch.output_rows.to("cuda"))

    def logits(self, batch: Batch) -> torch.Tensor:
        """Run a step; return the logits of its output rows, in host memory."""
        wanted, most = self.hidden(batch), self.plan.settings.parallel
        return torch.cat([self.model.logits(rows).cpu() for rows in wanted.split(most)])

    def _there(self, batch: Batch) -> GpuBatch:
        spans = tuple(replace(span, pages=span.pages.to("cuda")) for span in batch.spans)
        tables = {ring: _tables(batch, ring) for ring in (0, *self.rings)}
        return GpuBatch(
            tokens=batch.tokens.to("cuda"),
            positions=batch.positions.to("cuda"),
            kv_slots=batch.kv_slots.to("cuda"),
            spans=spans,
            output_rows=batch.output_rows,
            tables=tables,
            span_rows=max(span.rows for span in spans),
            context=self.plan.settings.context,
        )


def _some_hot(plan: Plan) -> ExpertPlacement | None:
    """Return as many random hot experts as planned; None where all experts are hot."""
    device, draw = plan.devices[0], Random(0)
    if device.hot_experts == device.total_experts:
        return None
    each = device.total_experts // sum(map(bool, device.hot_by_layer)) if device.hot_experts else 0
    hot = (draw.sample(range(each), count) for count in device.hot_by_layer)
    return ExpertPlacement(tuple(tuple(sorted(ids)) for ids in hot), "drawn")


def _rings(model: ModelDescription, plan: Plan) -> set[int]:
    mixers = [layer.mixer for layer in model.config.layers]
    windows = {mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig)}
    settings = plan.settings
    return {settings.window_pages(window) // settings.parallel for window in windows if window}


def _tables(batch: Batch, ring: int) -> StepTables:
    """Return a step's tables for layers whose window has `ring` pages; 0 for layers without one."""
    view = KvPages(_NoPages, ring).view(replace(batch, _shared={}))  # type: ignore[arg-type]
    sequence = [n for n, span in enumerate(batch.spans) for _ in range(span.rows)]
    index = [span.start + row for span in batch.spans for row in range(span.rows)]
    most = max(len(span.pages) for span in view.spans)
    pages = [[*span.pages.tolist(), *[0] * (most - len(span.pages))] for span in view.spans]
    whole = {"dtype": torch.int32, "device": "cuda"}
    return StepTables(
        rows=len(batch.tokens),
        positions=batch.positions.int().to("cuda"),
        sequence=torch.tensor(sequence, **whole),
        index=torch.tensor(index, **whole),
        starts=torch.tensor([span.start for span in batch.spans], **whole),
        pages=torch.tensor(pages, **whole),
        kv_slots=view.kv_slots.to("cuda"),
        state_slots=torch.tensor([span.state_slot for span in batch.spans], **whole),
    )


class _NoPages:
    page_size = PAGE_SIZE


def run_spans(model: ModelOnGpu, spans: Sequence[tuple[int, int]]) -> None:
    """Run a step of sequences with so many rows each, and so many tokens before them."""
    settings, turns = model.plan.settings, []
    for index, (rows, before) in enumerate(spans):
        pages = list(range(settings.sequence_pages))
        sequence = running([0] * (before + rows), pages, state_slot=index % settings.parallel)
        sequence.cached = before
        turns.append(Turn(sequence, rows))
    with torch.inference_mode():
        model.hidden(make_batch(turns, PAGE_SIZE))


def run_on_gpu(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    pieces: Sequence[int],
    after_step: Callable[[ModelOnGpu], None] = lambda stage: None,
    **settings: object,
) -> list[torch.Tensor]:
    """Read prompts together, in pieces of the same sizes; return the logits of all their rows."""
    stage = ModelOnGpu(checkpoint, **settings)
    sequences = [
        running(prompt, [4 * index + page for page in (2, 0, 3, 1)], state_slot=index)
        for index, prompt in enumerate(prompts)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for rows in pieces:
        with torch.inference_mode():
            logits = stage.logits(make_batch([Turn(one, rows) for one in sequences], PAGE_SIZE))
        after_step(stage)
        for index, one in enumerate(sequences):
            found[index].append(logits[index * rows : (index + 1) * rows])
            one.cached += rows
    return [torch.cat(parts) for parts in found]
