"""Layers of a GPU in steps of many rows ask nothing of it that the host would wait for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headroom.families.files import open_checkpoint
from headroom.kernels.cuda import experts_scratch, grouped
from headroom.kernels.cuda.attention import attend
from headroom.kernels.cuda.matmul import narrow_type
from headroom.plan import plan as planner
from tests.families import family_configs
from tests.families.family_gguf import write_gguf
from tests.stand_in.gpu import ADA, H200, TURING, Card, stand_in_gpu
from tests.stand_in.model import ModelOnGpu, run_spans
from tests.stand_in.tensors import WaitError, no_waits

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen35moe": lambda: family_configs.qwen35_moe(
        key_heads=2, value_heads=4, state_dim=128, **WIDE
    ),
    "gemma4-26b": lambda: family_configs.gemma4_moe(hidden_size=256),
}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp(request.param) / "m.gguf"
    write_gguf(MODELS[request.param](), written, "MIXED", fused=False, unused_keys=False)
    return written


def load(path: Path, card: Card, dtype: str) -> ModelOnGpu:
    settings = {"context": 512, "parallel": 3, "chunk": 300, "dtype": dtype, "kv_type": None}
    return ModelOnGpu(open_checkpoint(path), card.spec, **settings)


@pytest.mark.parametrize(
    ("unpack", "card", "dtype"),
    [(32 << 10, H200, "bf16"), (1 << 20, ADA, "bf16"), (32 << 10, H200, "f16"),
     (1 << 20, TURING, "f16")],
    ids=["experts in groups", "little shared memory", "experts in groups, f16", "sm_75"],
)  # fmt: skip
def test_no_layer_waits_for_the_device(
    path: Path, monkeypatch: pytest.MonkeyPatch, unpack: int, card: Card, dtype: str
) -> None:
    multiplied: list[torch.dtype] = []
    product = grouped.product

    def note(x: torch.Tensor, *given: Any) -> torch.Tensor:
        multiplied.append(x.dtype)
        return product(x, *given)

    monkeypatch.setattr(grouped, "product", note)
    monkeypatch.setattr(grouped, "product_way", lambda device: "own")
    monkeypatch.setattr(planner, "unpack_bytes_for", lambda total: unpack)
    with stand_in_gpu(monkeypatch, card, computes=False):
        model = load(path, card, dtype)
        with no_waits():
            run_spans(model, [(300, 212), (1, 511), (1, 400)])
            run_spans(model, [(33, 0)])
            monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
            run_spans(model, [(33, 0)])
    assert set(multiplied) == {narrow_type(dtype)}


def test_a_loop_over_experts_would_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
    monkeypatch.setattr(grouped, "product_way", lambda device: "loop")
    with stand_in_gpu(monkeypatch, computes=False):
        model = load(path, H200, "bf16")
        with no_waits(), pytest.raises(WaitError, match="tolist"):
            run_spans(model, [(33, 0)])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_of_long_spans_does_not_wait(
    dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = torch.randn(40, 4, 16).to(dtype), torch.randn(50, 2, 16).to(dtype)
    wanted = attend(queries, keys, keys, window)
    with stand_in_gpu(monkeypatch):
        there = queries.to("cuda"), keys.to("cuda")
        with no_waits():
            found = attend(there[0], there[1], there[1], window)
        torch.testing.assert_close(found.cpu(), wanted)


def test_waits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_gpu(monkeypatch):
        x = torch.arange(3, device="cuda")
        with no_waits():
            for wait in (x.tolist, x[:1].item, x.nonzero, lambda: x[x > 1], lambda: bool(x[0])):
                with pytest.raises(WaitError):
                    wait()
            assert x[torch.tensor([0, 2])].shape == (2,)
