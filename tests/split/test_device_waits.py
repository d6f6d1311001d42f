"""Layers of a GPU in steps of many rows ask nothing of it that the host would wait for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from headroom.kernels.cuda import experts_scratch, grouped
from headroom.kernels.cuda.attention import attend
from headroom.kernels.cuda.matmul import narrow_type
from tests.families import family_configs
from tests.families.family_gguf import write_gguf
from tests.split.host_gpu import load_on_host, pretend, run_step

WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen35moe": lambda: family_configs.qwen35_moe(
        key_heads=2, value_heads=4, state_dim=128, **WIDE
    ),
    "gemma4-26b": lambda: family_configs.gemma4_moe(hidden_size=256),
}
TENSOR = torch.Tensor
# What these give depends on values, or is one: the host must have them before it goes on.
WAITS = {
    *(TENSOR.tolist, TENSOR.item, TENSOR.cpu, TENSOR.numpy, TENSOR.nonzero, torch.nonzero),
    *(TENSOR.__bool__, TENSOR.__int__, TENSOR.__float__, TENSOR.__index__, TENSOR.__contains__),
    *(torch.masked_select, TENSOR.masked_select, torch.bincount, TENSOR.bincount, torch.argwhere),
    *(torch.unique, TENSOR.unique, torch.equal, TENSOR.equal, torch.allclose),
}
INDEXED = {TENSOR.__getitem__, TENSOR.__setitem__}


class WaitedError(AssertionError):
    """The host would have waited."""


class NoWaits(TorchFunctionMode):
    """Refuses calls of torch that wait for a GPU's values."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        masks = [x for x in tree_flatten(args[1:2])[0] if isinstance(x, torch.Tensor)]
        masked = func in INDEXED and any(x.dtype == torch.bool for x in masks)
        if func in WAITS or masked:
            raise WaitedError(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp(request.param) / "m.gguf"
    write_gguf(MODELS[request.param](), written, "MIXED", fused=False, unused_keys=False)
    return written


@pytest.mark.parametrize(
    ("unpack", "shared", "dtype"),
    [
        (32 << 10, 227 << 10, "bf16"),
        (1 << 20, 99 << 10, "bf16"),
        (32 << 10, 227 << 10, "f16"),
        (1 << 20, 64 << 10, "f16"),
    ],
    ids=["experts in groups", "little shared memory", "experts in groups, f16", "sm_75"],
)
def test_no_layer_waits_for_the_device(
    path: Path, monkeypatch: pytest.MonkeyPatch, unpack: int, shared: int, dtype: str
) -> None:
    pretend(monkeypatch, unpack, shared)
    multiplied: list[torch.dtype] = []
    product = grouped.product

    def note(x: torch.Tensor, *given: Any) -> torch.Tensor:
        multiplied.append(x.dtype)
        return product(x, *given)

    monkeypatch.setattr(grouped, "product", note)
    sm = 75 if shared == 64 << 10 else 90
    plan, model, _ = load_on_host(path, sm, context=512, parallel=3, chunk=300, dtype=dtype)
    with NoWaits():
        run_step(plan, model, [(300, 212), (1, 511), (1, 400)])
        run_step(plan, model, [(33, 0)])
        monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
        run_step(plan, model, [(33, 0)])
    assert set(multiplied) == {narrow_type(dtype)}


def test_a_loop_over_experts_would_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1 << 20)
    plan, model, _ = load_on_host(path, context=512, parallel=3, chunk=300)
    monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
    monkeypatch.setattr(grouped, "product_way", lambda device: "loop")
    with NoWaits(), pytest.raises(WaitedError, match="tolist"):
        run_step(plan, model, [(33, 0)])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_of_long_spans_does_not_wait(dtype: torch.dtype, window: int) -> None:
    queries, keys = torch.randn(40, 4, 16).to(dtype), torch.randn(50, 2, 16).to(dtype)
    with NoWaits():
        assert attend(queries, keys, keys, window).shape == (40, 4, 16)


def test_waits_are_noticed() -> None:
    x = torch.arange(3)
    with NoWaits():
        for wait in (x.tolist, x[:1].item, x.nonzero, lambda: x[x > 1], lambda: bool(x[0])):
            with pytest.raises(WaitedError):
                wait()
        assert x[torch.tensor([0, 2])].shape == (2,)
