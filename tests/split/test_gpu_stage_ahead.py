"""What a stage compiles ahead is what its first steps ask for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from headroom.families.files import open_checkpoint
from headroom.kernels.cuda.compile import WantedKernel
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.draws import DeviceSampler
from headroom.split import gpu_stage
from headroom.split.gpu_stage import GpuStage
from headroom.split.model import Model
from tests.split.cached_models import allow_small_caches, share_misses
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.model import ModelOnGpu
from tests.synth_models import write_model

# One of each family, with its experts in all forms; and of what is captured for more sequences.
CASES = [
    ("llama", "q4_k_m", 1),
    ("llama", "q4_k_m", 5),
    ("llama", "q4_k_m", 40),
    ("qwen35-wide", "q4_k_m", 4),
    ("gemma4-e2b", "q8_0", 4),
    ("qwen3moe", "q8_0", 4),
    ("qwen35moe-wide", "q4_k_m", 4),
    ("laguna", "q4_k_m", 4),
    ("gemma4-moe", "q4_k_m", 4),
]
# Sources of longer prompts, which are asked for once in a process: in a rehearsal, say.
ASKED_ONCE = {"unpack.cu", "many_experts.cu", "picks.cu", "half_experts.cu", "grouped.cu"}
WITH_EXPERTS = ("qwen3moe", "qwen35moe-wide", "laguna", "gemma4-moe")


class Ahead:
    """What was compiled ahead, and what the steps asked for before and after that."""

    def __init__(self, gpu: StandInGpu) -> None:
        self.kernels: set[WantedKernel] = set()
        self._gpu, self._asked_before = gpu, 0

    def note(self, wanted: Iterable[WantedKernel], report: Any = None) -> None:
        """Stand in for `compile_ahead`."""
        self.kernels, self._asked_before = set(wanted), len(self._gpu.asked)

    @property
    def missing(self) -> set[WantedKernel]:
        """The kernels that steps asked for and that were not compiled ahead."""
        return set(self._gpu.asked[self._asked_before :]) - self.kernels

    @property
    def unused(self) -> set[WantedKernel]:
        """The kernels that were compiled ahead and that no step asked for."""
        return self.kernels - set(self._gpu.asked[self._asked_before :])


def capture(gpu: StandInGpu, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Ahead:
    """Load a model on the stand-in GPU and run what a stage runs at start."""
    ahead = Ahead(gpu)
    monkeypatch.setattr(gpu_stage, "compile_ahead", ahead.note)
    made = ModelOnGpu(open_checkpoint(path), dtype="bf16", kv_type="bf16", **settings)
    drawing = DeviceSampler.allocate(DECODE_ROWS, made.described.config.vocab, "cuda:0")
    rings = frozenset(made.rings)
    stage = GpuStage("cuda:0", made.model, made.plan.settings, rings, drawing)
    try:
        stage.capture()
    finally:
        stage.close()
    return ahead


@pytest.mark.parametrize(("name", "mix", "parallel"), CASES)
def test_every_kernel_of_the_first_steps_is_compiled_ahead(
    name: str,
    mix: str,
    parallel: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_model(name, mix, tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        ahead = capture(gpu, path, monkeypatch, parallel=parallel)
    assert ahead.missing == set()
    assert {kernel.source for kernel in ahead.unused} <= ASKED_ONCE
    sources = {kernel.source for kernel in ahead.kernels}
    assert {"matmul.cu", "activations.cu", "rope.cu", "decode.cu", "attention.cu"} <= sources


@pytest.mark.parametrize(("budget", "cold"), [("0%", "cpu"), ("50%", "gpu"), ("50%", "auto")])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_kernel_of_the_first_steps_with_cold_experts_is_compiled_ahead(
    name: str, budget: str, cold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(name, "q4_k_m", tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        ahead = capture(gpu, path, monkeypatch, expert_budget=budget, cold=cold)
    assert ahead.missing == set()
    assert "experts.cu" in {kernel.source for kernel in ahead.kernels}


@pytest.mark.parametrize(
    ("name", "cold"), [*((name, "gpu") for name in WITH_EXPERTS), ("laguna", "auto")]
)
def test_every_kernel_of_the_first_steps_with_caches_is_compiled_ahead(
    name: str, cold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_small_caches(monkeypatch)
    share_misses(monkeypatch, cold)
    path = write_model(name, "q4_k_m", tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        ahead = capture(
            *(gpu, path, monkeypatch), expert_budget="50%", cold=cold, expert_policy="auto"
        )
    assert ahead.missing == set()
    of_caches = {kernel.name for kernel in ahead.kernels if kernel.source == "expert_cache.cu"}
    # The router of Gemma 4 scales its picks, so that no fused kernel takes them.
    fused = set() if name == "gemma4-moe" else {"choose_resolve"}
    assert of_caches == {"resolve", "fill", "shadow"} | fused
    assert "fill_gate_up" in {kernel.name for kernel in ahead.kernels}


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize(("parallel", "chunk"), [(1, 256), (20, 256), (3, 20), (2, 7)])
def test_rows_that_run_without_a_graph_are_compiled_ahead_too(
    capturable: bool,
    parallel: int,
    chunk: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Model, "capturable", capturable)
    path = write_model("llama", "q4_k_m", tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        ahead = capture(gpu, path, monkeypatch, parallel=parallel, chunk=chunk)
    assert len(ahead.kernels) > 20
    assert ahead.missing == set()


def test_a_step_that_cannot_be_rehearsed_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rehearsed = Model.run, []

    def fail_first(model: Model, batch: Any) -> Any:
        rehearsed.append(batch)
        if len(rehearsed) == 1:
            raise RuntimeError("no result of this kernel")
        return run(model, batch)

    monkeypatch.setattr(Model, "run", fail_first)
    path = write_model("llama", "q4_k_m", tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        ahead = capture(gpu, path, monkeypatch, parallel=1)
    assert len(ahead.kernels) > 20
    assert {kernel.source for kernel in ahead.missing} <= {
        *("matmul.cu", "activations.cu", "decode.cu"),
    }
