"""Every family with its tensors on the stand-in GPU, against the plain kernels of the CPU."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.experts import cuda_ffn
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.kernels import registry
from headroom.kernels.cuda import attention, experts, experts_prefill
from headroom.kernels.cuda import norms as cuda_norms
from headroom.kernels.reference import experts as plain_experts
from headroom.kernels.reference import norms
from headroom.kernels.reference import route as plain_route
from headroom.kernels.reference.matmul import matmul
from headroom.layers import cuda_block
from headroom.layers.cuda_rows import CudaRows, is_decode
from headroom.split import build as load
from tests.families.oracles import PROMPT, VARIANTS, variant
from tests.running import run_steps
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import run_on_gpu

TEXT = PROMPT + PROMPT[::-1]
PROMPTS = [TEXT[:41], TEXT[3:44]]
PIECES = [34, 1, 6]  # the first is longer than what goes as few rows
FEWER = [33, 2]  # for kernels that take their time here
# One variant of each kind of layer; the others differ in their files alone.
GENERIC = (
    *("llama", "qwen3-untied", "qwen3moe", "qwen35", "qwen35moe", "laguna"),
    *("laguna-per-element", "gemma4-31b", "gemma4-26b", "gemma4-e2b"),
)
FUSED = ("qwen3-tied", "gemma4-26b-separate", "gemma4-e2b")


def _wanted(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], pieces: list[int]
) -> list[torch.Tensor]:
    return run_steps(checkpoint, prompts, [pieces] * len(prompts), kernels="reference")


def _assert_near(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GENERIC)
def test_separate_operations_stay_on_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "MIXED"))
    wanted = _wanted(checkpoint, PROMPTS, PIECES)
    with stand_in_gpu(monkeypatch):
        found = run_on_gpu(checkpoint, PROMPTS, PIECES, kernels="reference")
    _assert_near(found, wanted)


def _rows(x: torch.Tensor, narrow: object = None) -> CudaRows:
    """Rows as they are, whatever a kernel would round them to."""
    return CudaRows(len(x), decode=x) if is_decode(len(x)) else CudaRows(len(x), prefill=x)  # type: ignore[arg-type]


def _floats(rows: CudaRows) -> Any:
    return rows.prefill if rows.decode is None else rows.decode


def _normed_rows(x: torch.Tensor, norm: Any, narrow: object) -> CudaRows:
    normed = norms.rms_norm(x, norm.weight, norm.eps)
    return _rows(normed if norm.out is None else norm.out.copy_(normed))


def _gated_rows(gate: torch.Tensor, up: torch.Tensor, activation: str, narrow: object) -> CudaRows:
    return _rows(norms.gated_activation(gate, up, activation))


class _Matrices:
    """Stands in for matrices in tiles."""

    def __init__(self, get: Any, names: Sequence[str], orders: Sequence[Any] = ()) -> None:
        self._weights = [get(*named) for named in zip(names, orders or [None] * 9, strict=False)]

    def __call__(self, x: CudaRows, add: torch.Tensor | None = None) -> list[torch.Tensor]:
        outs = [matmul(_floats(x), weight, "f32") for weight in self._weights]
        return outs if add is None else [add.add_(outs[0])]


def _scored_rows(
    x: torch.Tensor, weight: torch.Tensor, norm: Any, seen: torch.Tensor, narrow: object
) -> tuple[CudaRows, torch.Tensor]:
    return _normed_rows(x, norm, narrow), norms.rms_norm(x, seen, norm.eps) @ weight.T


def _add_norm(residual: torch.Tensor, x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    return residual.add_(norms.rms_norm(x, weight, eps))


def _experts(
    x: Any, ids: Any, weights: Any, table: Any, activation: str, others: Any, out: Any
) -> Any:
    answers = plain_experts.experts(x, ids, weights, table, activation, "f32")
    if others.shared is not None:
        scale = 1.0 if others.shared_logits is None else others.shared_logits[:, :1].sigmoid()
        answers += others.shared * scale
    if others.residual is not None:
        answers += others.residual
    return answers if out is None else out.copy_(answers)


def _route(logits: Any, rule: Any, bias: Any, counts: Any, sequence: Any) -> Any:
    assert len(sequence) == len(logits)
    return plain_route.route(logits[:, : len(counts)], rule, bias, counts)


def _tables(get: Any, count: int) -> Any:
    with torch.device("cuda"):
        return plain_experts.prepare(get.experts_from_file(count))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers of fused parts, exactly: attention by its kernels, products and norms stood in for."""
    prefilled = attention.prefill
    monkeypatch.setattr(attention, "prefill", lambda *args: prefilled(*args[:4], "f32"))
    plain = tuple(k for k in registry.KERNELS if not k.backend.startswith(("cuda", "triton")))
    monkeypatch.setattr(registry, "KERNELS", plain)
    monkeypatch.setattr(load, "fits_cuda", lambda mixer, get: get.case.device == "cuda")
    monkeypatch.setattr(load, "experts_fit", lambda config, get: True)
    monkeypatch.setattr(cuda_norms, "rms_norm", norms.rms_norm)
    monkeypatch.setattr(cuda_norms, "norm_add", _add_norm)
    for module in (cuda_block, cuda_ffn):
        monkeypatch.setattr(module, "load_merged", _Matrices)
        monkeypatch.setattr(module, "normed_rows", _normed_rows)
        monkeypatch.setattr(module, "gated_rows", _gated_rows)
        monkeypatch.setattr(module, "narrow_type", lambda dtype: torch.float32)
    monkeypatch.setattr(cuda_block, "plain_rows", _rows)
    monkeypatch.setattr(experts, "few_rows", _experts)
    monkeypatch.setattr(experts_prefill, "many_rows", _experts)
    monkeypatch.setattr(cuda_ffn, "upload_experts", _tables)
    monkeypatch.setattr(cuda_ffn, "scored_rows", _scored_rows)
    monkeypatch.setattr(cuda_ffn.cuda_route, "route", _route)
    with stand_in_gpu(monkeypatch):
        yield


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", FUSED)
def test_fused_parts_are_put_together_as_their_family_wants(
    name: str, tmp_path: Path, fused: None
) -> None:
    checkpoint = open_checkpoint(variant(name).save_gguf(tmp_path / "m.gguf", "MIXED"))
    wanted = _wanted(checkpoint, PROMPTS[:1], FEWER)
    _assert_near(run_on_gpu(checkpoint, PROMPTS[:1], FEWER), wanted)


def test_the_variants_are_known() -> None:
    assert {*GENERIC, *FUSED} <= set(VARIANTS)
