"""What a stage compiles ahead is what its first steps ask for."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from headroom.families.files import open_checkpoint
from headroom.kernels.cuda.compile import Code
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.draws import DeviceSampler
from headroom.split import gpu_stage
from headroom.split.gpu_stage import GpuStage
from headroom.split.model import Model
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import ModelOnGpu
from tests.synth_models import write_model

FORESEEN = ("matmul.cu", "activations.cu")
Named = set[tuple[str, frozenset[tuple[str, int]]]]


def names(codes: Iterable[Code]) -> Named:
    return {(source, frozenset(macros.items())) for source, macros in codes}


def capture(path: Path, **settings: object) -> None:
    """Load a model on the stand-in GPU and run what a stage runs at start."""
    made = ModelOnGpu(open_checkpoint(path), **settings)
    drawing = DeviceSampler.allocate(DECODE_ROWS, made.described.config.vocab, "cuda:0")
    rings = frozenset(made.rings)
    GpuStage("cuda:0", made.model, made.plan.settings, rings, drawing).capture()


@pytest.mark.parametrize(
    ("name", "mix", "parallel"),
    [
        ("llama", "q4_k_m", 1),
        ("llama", "q4_k_m", 5),
        ("llama", "q4_k_m", 40),
        ("qwen35-wide", "q4_k_m", 4),
        ("gemma4-e2b", "q8_0", 4),
        ("qwen3moe", "q8_0", 4),
        ("qwen35moe-wide", "q4_k_m", 4),
        ("laguna", "q4_k_m", 4),
        ("gemma4-moe", "q4_k_m", 4),
    ],
)
def test_a_stage_compiles_ahead_just_what_its_first_steps_ask_for(
    name: str,
    mix: str,
    parallel: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead: list[Code] = []
    monkeypatch.setattr(gpu_stage, "compile_ahead", ahead.extend)
    path = write_model(name, mix, tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        capture(path, dtype="bf16", kv_type="bf16", parallel=parallel)
    wanted = names(code for code in gpu.codes if code[0] in FORESEEN)
    assert {source for source, _ in wanted} == set(FORESEEN)
    if parallel > 16:  # the head alone is asked for 24 rows
        assert wanted <= names(ahead)
    else:
        assert wanted == names(ahead)


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize(("parallel", "chunk"), [(1, 256), (20, 256), (3, 20), (2, 7)])
def test_rows_that_run_without_a_graph_are_compiled_ahead_too(
    capturable: bool,
    parallel: int,
    chunk: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead: list[Code] = []
    monkeypatch.setattr(gpu_stage, "compile_ahead", ahead.extend)
    monkeypatch.setattr(Model, "capturable", capturable)
    path = write_model("llama", "q4_k_m", tmp_path, few_layers=True)
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        capture(path, dtype="bf16", kv_type="bf16", parallel=parallel, chunk=chunk)
    wanted = names(code for code in gpu.codes if code[0] in FORESEEN)
    assert len(wanted) > 20
    assert wanted <= names(ahead)
