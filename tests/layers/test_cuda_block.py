"""CudaBlock: which layers the fused kernels take, the order of parts, gates, whole families."""

from pathlib import Path

import pytest
import torch

from headroom.families.config import AttentionConfig, DeltaNetConfig, RopeConfig
from headroom.families.files import open_checkpoint
from headroom.kernels.cuda import attention, delta_net_scratch, scratch
from headroom.kernels.cuda.attention import Gate, GateKind
from headroom.kernels.cuda.buffers import Buffer
from headroom.kernels.ops import Case
from headroom.layers.batch import GpuBatch
from headroom.layers.cuda_block import CudaBlock, CudaScale, _apply_gate, fits_cuda
from headroom.layers.weights import WeightSource
from tests.families.oracles import PROMPT, VARIANTS, variant
from tests.running import run_steps
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import ADA, stand_in_gpu
from tests.stand_in.model import ModelOnGpu, run_on_gpu

FUSED = ("qwen3-tied", "glm4moe", "gemma4-26b-separate", "gemma4-e2b")
# Where two experts have nearly the same score, rounding to f16 picks the other one: no two have it
# for these tokens.
TOKENS = torch.randint(3, max(PROMPT), (35,), generator=torch.Generator().manual_seed(0)).tolist()
PIECES = [33, 2]  # a prefill step, then a decode step
ROUNDING = 0.01  # of a row's logits, relative; up to 0.0054 was measured
EMPTY = torch.empty(0, dtype=torch.int64)


def source(**case: object) -> WeightSource:
    how = Case(**{"device": "cuda", "dtype": "f16"} | case)  # type: ignore[arg-type]
    return WeightSource({}, how, False, lambda line, size: None)


def attention_of(head_dim: int) -> AttentionConfig:
    return AttentionConfig(4, 2, head_dim, RopeConfig(1e4, head_dim), scale=1.0)


def delta_net_of(head_dim: int) -> DeltaNetConfig:
    return DeltaNetConfig(2, 4, head_dim, conv=4, tiled=False, decay_is_log=False)


@pytest.mark.parametrize(
    ("mixer", "fits"),
    [
        (attention_of(16), True),
        (attention_of(attention.MOST_DIM), True),
        (attention_of(attention.MOST_DIM + 16), False),
        (attention_of(72), False),
        (delta_net_of(delta_net_scratch.DIM), True),
        (delta_net_of(delta_net_scratch.DIM // 2), False),
    ],
)
def test_fused_kernels_take_the_heads_that_they_are_written_for(
    mixer: AttentionConfig | DeltaNetConfig, fits: bool
) -> None:
    for dtype in ("bf16", "f16"):
        assert fits_cuda(mixer, source(dtype=dtype)) == fits


@pytest.mark.parametrize(
    "case",
    [{"device": "hip"}, {"device": "cpu"}, {"dtype": "f32"}, {"reference": True}, {"triton": True}],
)
def test_other_devices_types_and_kernels_have_no_fused_layers(case: dict[str, object]) -> None:
    assert not fits_cuda(attention_of(64), source(**case))


def gpu_batch() -> GpuBatch:
    return GpuBatch(EMPTY, EMPTY, EMPTY, (), EMPTY, tables={}, span_rows=1, context=64)


def test_parts_run_in_order_on_the_same_rows_and_each_has_the_whole_scratch() -> None:
    places: list[int] = []

    def add_one(x: torch.Tensor, batch: GpuBatch) -> None:
        places.append(scratch.take(Buffer((64,), "f32"), x.device).data_ptr())
        x += 1

    arena = scratch.Arena(torch.empty(512, dtype=torch.uint8))
    x = torch.full((2, 3), 4.0)
    with scratch.opened(arena):
        found = CudaBlock(add_one, CudaScale(torch.tensor(0.5)), add_one)(x, gpu_batch())
    assert found is x
    assert torch.equal(x, torch.full((2, 3), 3.5))  # (4 + 1) / 2 + 1
    assert len(places) == 2
    assert len(set(places)) == 1


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
def test_gates_multiply_each_value_or_each_head(kind: GateKind, per_head: bool) -> None:
    torch.manual_seed(0)
    heads, dim = 3, 4
    mixed = torch.randn(5, heads * dim)
    values = 20 * torch.randn(5, heads if per_head else heads * dim)
    exact = values.double()
    gates = exact.sigmoid() if kind == "sigmoid" else (1 + exact.exp()).log()
    wanted = mixed.double() * (gates.repeat_interleave(dim, dim=1) if per_head else gates)
    _apply_gate(mixed, Gate(values, kind), heads)
    torch.testing.assert_close(mixed.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", FUSED)
def test_fused_parts_are_put_together_as_their_family_wants(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "MIXED"))
    (wanted,) = run_steps(checkpoint, [TOKENS], [PIECES], kernels="reference")

    def all_fused(stage: ModelOnGpu) -> None:
        assert stage.model.capturable

    with stand_in_gpu(monkeypatch, ADA):
        (found,) = run_on_gpu(checkpoint, [TOKENS], PIECES, all_fused, gpu=ADA.spec, dtype="f16")
    assert float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) < ROUNDING


def test_the_variants_are_known() -> None:
    assert set(FUSED) <= set(VARIANTS)
