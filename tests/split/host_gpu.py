"""A GPU that is not there: its launchers run in host memory, with kernels that do nothing.

What they take from the plan's memory is as it would be on the GPU; what is in it is not looked at.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.experts import cuda_ffn
from headroom.families.files import open_checkpoint
from headroom.kernels.cuda import attention, grouped, matmul, route
from headroom.kernels.cuda.experts import PARTS, ExpertTiles
from headroom.kernels.cuda.sizes import PACKED, tile_bytes
from headroom.kernels.ops import Span, StepTables
from headroom.kernels.weight import Weight
from headroom.layers import cuda_block, weights
from headroom.layers.batch import GpuBatch
from headroom.layers.cuda_rows import MergedLinear
from headroom.layers.weights import WeightSource
from headroom.options import Options
from headroom.plan import plan as planner
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.split import build as load
from headroom.split.model import Model
from tests.plan.shapes import gpu, host
from tests.stand_in.kernels import use_kernels

ROUTE = route.route


def no_kernel(source: str, name: str, defines: object = None) -> Callable[..., None]:
    """Stand in for `compile_kernel`."""
    return lambda *call, **more: None


def route_to_first(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for the router, whose ids are looked at on the host: no kernel writes them here."""
    ids, weights = ROUTE(*given, **named)
    return ids.zero_(), weights.zero_()


def in_tiles(weight: Weight) -> Weight:
    """A weight's tiles without its values; other types in 16 bits."""
    if weight.quant not in PACKED:
        values = torch.zeros(weight.rows, weight.columns, dtype=torch.bfloat16)
        return replace(weight, data=values)
    size = tile_bytes(weight.quant, weight.rows, weight.columns)
    return replace(weight, data=torch.zeros(size, dtype=torch.uint8), layout=matmul.TILES)


def load_merged(get: WeightSource, names: Sequence[str], orders: object = ()) -> MergedLinear:
    """Every matrix for itself."""
    made = [in_tiles(get.from_file(name)) for name in names]
    for weight in made:
        get.count(get.line, weight.nbytes)
    members = tuple((index,) for index in range(len(made)))
    return MergedLinear(tuple(made), members, tuple(weight.rows for weight in made))


def experts_in_tiles(get: WeightSource, count: int) -> ExpertTiles:
    """A layer's experts in tiles without their values, and without addresses."""
    parts = get.locate_experts(count)
    gate = parts[0][0]
    size = sum(
        one.count * tile_bytes(one.quant, one.rows, one.columns) for part in parts for one in part
    )
    where = torch.zeros(count, PARTS, dtype=torch.int64)
    kinds = tuple(part[0].quant for part in parts)
    return ExpertTiles(where, kinds, gate.rows, gate.columns, size, ())


def table_in_tiles(get: WeightSource, name: str, rows: object = None) -> Weight:
    """What a head's weight becomes; tables of plain types stay as they are."""
    weight = get.from_file(name)
    made = in_tiles(weight) if weight.quant in PACKED else weight
    get.count(get.line, made.nbytes)
    return made


def pretend(
    monkeypatch: pytest.MonkeyPatch, unpack_bytes: int, shared_bytes: int = 227 << 10
) -> None:
    """Let launchers run in host memory, with so little memory to unpack weights into.

    `shared_bytes` is what a block of the GPU may have.
    """
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=shared_bytes,
        shared_memory_per_multiprocessor=shared_bytes + (1 << 10),
    )
    use_kernels(monkeypatch, no_kernel)
    monkeypatch.setattr(route, "route", route_to_first)
    monkeypatch.setattr(grouped, "product_way", lambda device: "own")
    monkeypatch.setattr(torch, "mm", lambda first, second, out_dtype=None, out=None: out)
    monkeypatch.setattr(attention, "attend", lambda queries, *others: queries)
    for module in (cuda_block, cuda_ffn):
        monkeypatch.setattr(module, "load_merged", load_merged)
    monkeypatch.setattr(cuda_ffn, "upload_experts", experts_in_tiles)
    monkeypatch.setattr(weights.WeightSource, "__call__", table_in_tiles)
    for name in ("Embedding", "Head"):
        monkeypatch.setattr(load, name, lambda *given: None)
    monkeypatch.setattr(load, "fits_cuda", lambda mixer, get: True)
    monkeypatch.setattr(load, "experts_fit", lambda config, get: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(planner, "unpack_bytes_for", lambda total: unpack_bytes)


def load_on_host(path: Path, sm: int = 90, **settings: object) -> tuple[Plan, Model, Counter[str]]:
    """A model as a GPU would hold it, and the bytes that it counted."""
    model = describe(open_checkpoint(path))
    options = Options(model=str(path), threads=1, **settings)  # type: ignore[arg-type]
    device = gpu(8, name="cpu", sm=sm)
    plan = make_plan([model.shape], [device, host(8)], options)
    counted: Counter[str] = Counter()

    def count(line: str, size: int) -> None:
        counted[line] += size

    return (
        plan,
        load.load_model(model.config, model.checkpoint.tensors, plan, plan.devices[0], count),
        counted,
    )


def run_step(plan: Plan, model: Model, spans: Sequence[tuple[int, int]]) -> None:
    """Run the layers on spans of (rows, tokens before), each a sequence of its own."""
    settings, made, first = plan.settings, [], 0
    pages = torch.arange(settings.sequence_pages)
    for slot, (rows, start) in enumerate(spans):
        made.append(Span(first, rows, start, pages, slot % settings.parallel))
        first += rows
    rings = {0} | {
        settings.window_pages(layer.window) // settings.parallel
        for layer in describe_layers(model)
        if layer.window
    }
    count = len(made)
    table = StepTables(
        rows=first,
        positions=torch.zeros(first, dtype=torch.int32),
        sequence=torch.zeros(first, dtype=torch.int32),
        index=torch.zeros(first, dtype=torch.int32),
        starts=torch.zeros(count, dtype=torch.int32),
        pages=torch.zeros(count, settings.sequence_pages, dtype=torch.int32),
        slots=torch.zeros(first, dtype=torch.int64),
        state_slots=torch.zeros(count, dtype=torch.int32),
    )
    batch = GpuBatch(
        tokens=torch.zeros(first, dtype=torch.int64),
        positions=torch.zeros(first, dtype=torch.int64),
        slots=torch.zeros(first, dtype=torch.int64),
        spans=tuple(made),
        output_rows=torch.zeros(1, dtype=torch.int64),
        tables=dict.fromkeys(rings, table),
        span_rows=max(rows for rows, _ in spans),
        context=settings.context,
    )
    x = model._workspace.stream[:first]
    with torch.inference_mode(), model._workspace.lend():
        for block in model._blocks:
            block(x, batch)


def describe_layers(model: Model) -> list[cuda_block.AttentionConfig]:
    """The attention of a model's layers."""
    parts = [part for block in model._blocks for part in block._parts]  # type: ignore[attr-defined]
    return [part._config for part in parts if isinstance(part, cuda_block.CudaAttention)]
