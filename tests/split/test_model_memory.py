"""The memory of a GPU is held to the plan: what is loaded, and what its steps take."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from headroom.experts import cuda_ffn
from headroom.families.files import open_checkpoint
from headroom.formats.quants import BF16, Q8_0
from headroom.kernels.cuda import delta_net, experts_prefill, grouped
from headroom.kernels.cuda.buffers import Buffer, Buffers, ScratchCount
from headroom.kernels.cuda.delta_net import span_tables
from headroom.kernels.cuda.experts import ExpertTiles
from headroom.kernels.cuda.matmul import TILES, narrow_type
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.cuda.scratch import Arena, frame, opened
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.kernels.ops import Picks
from headroom.kernels.weight import Weight
from headroom.layers import cuda_block
from headroom.layers.cuda_rows import MergedLinear
from headroom.layers.weights import WeightSource
from headroom.plan import plan as planner
from headroom.plan.describe import describe
from headroom.plan.device_scratch import SpanRows, StepRows, Variant, parts_of
from headroom.plan.lines import kept_logits_bytes
from headroom.plan.workspace import device_step
from tests.families import family_configs
from tests.families.family_gguf import write_gguf
from tests.gpu import check_delta_net
from tests.stand_in.gpu import ADA, H200, TURING, Card, stand_in_gpu
from tests.stand_in.kernels import no_kernel, use_kernels
from tests.stand_in.model import ModelOnGpu, run_spans

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: family_configs.llama(**WIDE, intermediate_size=768),
    "qwen3moe": lambda: family_configs.qwen3_moe(**WIDE, moe_intermediate_size=96),
    "qwen35": lambda: family_configs.qwen35(
        key_heads=2, value_heads=6, state_dim=128, intermediate_size=704, **WIDE
    ),
    "qwen35moe": lambda: family_configs.qwen35_moe(
        key_heads=2, value_heads=4, state_dim=128, **WIDE
    ),
    "laguna": lambda: family_configs.laguna(hidden_size=256),
    "gemma4-31b": lambda: family_configs.gemma4(hidden_size=256, num_hidden_layers=6),
    "gemma4-26b": lambda: family_configs.gemma4_moe(hidden_size=256),
}


@pytest.fixture(scope="module", params=[*MODELS, "gemma4-e4b"])
def every_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family, one with per-layer inputs among them."""
    written = tmp_path_factory.mktemp(request.param) / "m.gguf"
    model = MODELS.get(request.param, family_configs.gemma4_small)()
    write_gguf(model, written, "MIXED", fused=False, unused_keys=False)
    return written


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp(request.param) / "m.gguf"
    write_gguf(MODELS[request.param](), written, "MIXED", fused=False, unused_keys=False)
    return written


def load(path: Path, card: Card, **settings: object) -> ModelOnGpu:
    """A model on a card, with the types that the card computes in."""
    types = {"dtype": None, "kv_type": None, "context": 512, "parallel": 3}
    return ModelOnGpu(open_checkpoint(path), card.spec, **types, **settings)


@pytest.mark.parametrize(("card", "dtype"), [(H200, "bf16"), (TURING, "f16")])
def test_a_gpu_loads_what_its_plan_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, card: Card, dtype: str
) -> None:
    with stand_in_gpu(monkeypatch, card, computes=False):
        model = load(path, card, chunk=100)
    assert model.plan.settings.compute_type == dtype
    lines, counted = model.plan.devices[0].allocated, model.counted
    drawing = lines.pop("logits") - counted.pop("logits")
    assert drawing > 0  # the sampler's, which the stage allocates
    # Snapshots lie in host memory, with logits that `start_pipeline` allocates.
    hosted = sum(line.bytes for line in model.plan.host.lines if line.name == "snapshots")
    kept = kept_logits_bytes(model.described.shape, model.plan.settings)
    assert counted.pop("snapshots", 0) + kept == hosted
    assert counted == lines


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_a_gpu_loads_plain_experts_as_its_plan_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(MODELS["qwen3moe"](), tmp_path / "m.gguf", kind, fused=False, unused_keys=False)
    with stand_in_gpu(monkeypatch, computes=False):
        model = load(tmp_path / "m.gguf", H200, chunk=100)
    assert model.counted["hot_experts"] == model.plan.devices[0].allocated["hot_experts"]
    blocks = model.model._blocks
    parts = [type(part) for block in blocks for part in getattr(block, "_parts", ())]
    assert (cuda_ffn.CudaExpertsFfn in parts) == (kind != "F32")


class RecordingArena(Arena):
    """An arena that keeps a list of what was taken, and at which byte."""

    def __init__(self, memory: torch.Tensor, unpack_bytes: int) -> None:
        super().__init__(memory, unpack_bytes)
        self.taken: list[tuple[int, Buffer]] = []

    def take(self, buffer: Buffer) -> torch.Tensor:
        self.taken.append((self._used, buffer))
        return super().take(buffer)


class RecordingCount(ScratchCount):
    """A planner's count that keeps the same list."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[int, Buffer]] = []

    def take(self, *taken: Buffer | Buffers) -> None:
        for one in taken:
            for buffer in (one,) if isinstance(one, Buffer) else one:
                self.taken.append((self.used_bytes, buffer))
                super().take(buffer)

    def largest(self, sizes: Sequence[int]) -> Sequence[int]:
        return sizes


def load_as(variant: Variant) -> Callable[..., MergedLinear]:
    """Stand in for `load_merged`: weights without values that lie as a variant says."""

    def load_merged(get: WeightSource, names: Sequence[str], orders: object = ()) -> MergedLinear:
        assert variant.merged is not None
        matrices = [get.locate(name) for name in names]
        runs: list[list[int]] = []
        for index in range(len(names)):
            runs[-1].append(index) if index in variant.merged else runs.append([index])
        made = []
        for run in runs:
            rows, columns = sum(matrices[index].rows for index in run), matrices[0].columns
            if variant.tiled:
                size = tile_bytes(Q8_0, rows, columns)
                tiles = torch.zeros(size, dtype=torch.uint8, device="cuda")
                made.append(Weight(tiles, Q8_0, rows, columns, TILES))
            else:
                dtype = narrow_type(get.case.dtype)
                plain = torch.zeros(rows, columns, dtype=dtype, device="cuda")
                made.append(Weight(plain, BF16, rows, columns))
        rows_of_each = tuple(matrix.rows for matrix in matrices)
        return MergedLinear(tuple(made), tuple(map(tuple, runs)), rows_of_each)

    return load_merged


def no_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stand in for `torch.mm`: memory of the product's shape."""
    return x.new_zeros(len(x), weight.shape[1], dtype=out_dtype) if out is None else out


def given_picks(x: torch.Tensor, picks: Picks | RouterLogits) -> Picks:
    """Stand in for what resolves picks: the GPU takes all of them."""
    return picks.top_k() if isinstance(picks, RouterLogits) else picks


def no_answer(*rows: torch.Tensor) -> None:
    """Stand in for the CPU that computes cold experts."""


# Steps of sequences with (rows, tokens before): few rows by decode, many by prefill, as many as
# there are planned, a chunk at the end of a context among sequences that decode.
STEPS = (
    [(1, 0)], [(1, 511), (1, 3)], [(1, 511)] * 3, [(9, 100)], [(32, 480)], [(33, 0)],
    [(300, 212), (1, 511), (1, 511), (1, 400)], [(303, 209)], [(65, 0), (64, 100), (1, 7)],
)  # fmt: skip
APART, TOGETHER, FIRST_TWO = frozenset[int](), frozenset({1, 2, 3}), frozenset({1})


@pytest.mark.parametrize(
    ("card", "unpack", "variant"),
    [
        (H200, 32 << 10, Variant(APART, tiled=True, cold=False)),
        (ADA, 1 << 20, Variant(TOGETHER, tiled=True, cold=False)),
        (H200, 32 << 10, Variant(FIRST_TWO, tiled=False, cold=True)),
        (TURING, 32 << 10, Variant(TOGETHER, tiled=True, cold=True)),
        (TURING, 1 << 20, Variant(APART, tiled=False, cold=False)),
    ],
)
def test_every_buffer_of_a_step_is_taken_where_the_planner_counts_it(
    every_path: Path, monkeypatch: pytest.MonkeyPatch, card: Card, unpack: int, variant: Variant
) -> None:
    monkeypatch.setattr(planner, "unpack_bytes_for", lambda total: unpack)
    monkeypatch.setattr(grouped, "product_way", lambda device: "own")
    for module in (cuda_block, cuda_ffn):
        monkeypatch.setattr(module, "load_merged", load_as(variant))
    if variant.cold:
        monkeypatch.setattr(experts_prefill, "_as_they_lie", lambda ids, table: False)
        monkeypatch.setattr(ExpertTiles, "over_link", property(lambda table: True))
    layers = describe(open_checkpoint(every_path)).shape.layers
    with stand_in_gpu(monkeypatch, card, computes=False):
        monkeypatch.setattr(torch, "mm", no_product)
        made = load(every_path, card, chunk=300)
        plan, model = made.plan, made.model
        for block in model._blocks:
            for part in block._parts:  # type: ignore[attr-defined]
                if variant.cold and hasattr(part, "resolver"):  # nothing is computed by a CPU
                    part.resolver = SimpleNamespace(
                        asks_cpu=True, resolve=given_picks, add_answers=no_answer
                    )
        settings = device_step(model._workspace.stream.shape[1], plan.settings)
        planned = plan.devices[0].allocated["workspace"]
        for spans in STEPS:
            arena = RecordingArena(model._workspace.scratch, plan.settings.unpack_bytes)
            model._workspace = replace(model._workspace, arena=arena)
            run_spans(made, spans)
            count = RecordingCount()
            step = StepRows(tuple(SpanRows(rows, start) for rows, start in spans), settings)
            for layer in layers:
                for walk in parts_of(layer).values():
                    with count.frame():
                        walk(count, layer, step, variant)
            assert arena.taken == count.taken
            assert arena.taken
            assert arena.peak_bytes == count.peak_bytes <= planned
            assert arena.frames == 0


class Results(TorchDispatchMode):
    """Notes in which memory the results of torch's operations are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
        self.found |= {x.untyped_storage().data_ptr() for x in tensors}
        return result


@pytest.mark.parametrize("card", [H200, ADA, TURING])
def test_gated_linear_attention_takes_all_its_memory_from_the_arena(
    monkeypatch: pytest.MonkeyPatch, card: Card
) -> None:
    use_kernels(monkeypatch, no_kernel)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card.properties)
    shape, rows = check_delta_net.Shape(6, 2, tiled=False), 200
    weights, state = check_delta_net.make_weights(shape), check_delta_net.make_state(shape, 1)
    inputs = check_delta_net.make_rows(shape, rows)
    tables = span_tables((check_delta_net.span(0, rows, 3, 0),), rows, torch.device("cpu"))
    memory = torch.zeros(16 << 20, dtype=torch.uint8)
    with opened(Arena(memory)), frame(), Results() as results:
        delta_net.prefill(inputs, weights, state, tables)
    assert results.found == {memory.untyped_storage().data_ptr()}
