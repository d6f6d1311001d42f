"""Kernels of the stand-in GPU: CUDA sources built by the C++ compiler, Triton's interpreted."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headroom.kernels.cuda import attention as cuda_attention
from headroom.kernels.cuda import compile as cuda_compile
from headroom.kernels.cuda import route as cuda_route
from headroom.kernels.ops import Picks
from headroom.kernels.triton import launch as triton_launch
from tests.stand_in.cuda_on_cpu import compile_on_cpu
from tests.stand_in.tensors import DeviceTensor, WrongDeviceError, launch, plain

Kernel = Callable[..., None]
FindKernel = Callable[[str, str, dict[str, int]], Kernel]  # by source, name and macros
IsPinned = Callable[[torch.Tensor], bool]


def use_kernels(monkeypatch: pytest.MonkeyPatch, find: FindKernel) -> None:
    """Let every launcher of CUDA kernels get them from a function."""

    def find_kernel(source: str, name: str, defines: Any, device: int) -> Kernel:
        return find(source, name, dict(defines))

    monkeypatch.setattr(cuda_compile, "_find_kernel", find_kernel)
    monkeypatch.setattr(cuda_compile, "_FOUND", {})
    monkeypatch.setattr(cuda_compile, "current_device", lambda: 0)


def compile_few_blocks(source: str, name: str, defines: dict[str, int]) -> Kernel:
    """Build a kernel for the CPU.

    The blocks of one kernel share out its work, however many they are: it gets a single block.
    """
    kernel = compile_on_cpu(source, name, defines)
    shares_work = (source, name) == ("many_experts.cu", "activate")
    return (lambda grid, *rest, **how: kernel((1,), *rest)) if shares_work else kernel


def no_kernel(source: str, name: str, defines: dict[str, int]) -> Kernel:
    """Return a kernel that does nothing."""
    return lambda *call, **how: None


def _check_arguments(args: Sequence[Any], kernel: str, is_pinned: IsPinned) -> None:
    for x in args:
        reached = not isinstance(x, torch.Tensor) or isinstance(x, DeviceTensor) or is_pinned(x)
        if not reached:
            raise WrongDeviceError(f"{kernel} is given a tensor of the host")


def skip_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be computed where kernels do nothing; every row is routed to expert 0."""
    route = cuda_route.route

    def route_to_first(*given: Any, **named: Any) -> Picks:
        ids, weights = route(*given, **named)
        return Picks(ids.zero_(), weights.zero_())

    monkeypatch.setattr(cuda_route, "route", route_to_first)
    monkeypatch.setattr(torch, "mm", lambda first, second, out_dtype=None, out=None: out)
    monkeypatch.setattr(cuda_attention, "attend", lambda queries, *others: queries)


def on_gpu_only(find: FindKernel, is_pinned: IsPinned) -> FindKernel:
    """Let kernels for the CPU take tensors of the stand-in GPU and pinned ones, and no others."""

    def found(source: str, name: str, defines: dict[str, int]) -> Kernel:
        kernel = find(source, name, defines)

        def start(
            grid: Sequence[int],
            block: Sequence[int],
            args: Sequence[Any],
            shared_bytes: int = 0,
            early: bool = False,
        ) -> None:
            _check_arguments(args, f"{source}:{name}", is_pinned)
            plain_args = [plain(x) for x in args]
            launch(name, lambda: kernel(grid, block, plain_args, shared_bytes))

        return start

    return found


class InterpretedKernel:
    """A kernel of Triton in its interpreter, for the same tensors."""

    def __init__(self, module: str, name: str, is_pinned: IsPinned, computes: bool) -> None:
        self._kernel = triton_launch.find_kernel(module, name)
        self._name, self._is_pinned, self._computes = name, is_pinned, computes

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def start(*args: Any, **named: Any) -> None:
            _check_arguments((*args, *named.values()), self._name, self._is_pinned)
            plain_args = [plain(x) for x in args]
            plain_named = {name: plain(x) for name, x in named.items()}
            launch(self._name, lambda: self._run(grid, plain_args, plain_named))

        return start

    def _run(self, grid: Any, args: list[Any], named: dict[str, Any]) -> None:
        if self._computes:
            with torch._C.DisableTorchFunction():
                self._kernel[grid](*args, **named)


def product(
    x: torch.Tensor,
    matrix: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stand in for `torch.mm` of a GPU, which adds up 16-bit values in float32: CPUs do not."""
    assert x.dtype == matrix.dtype
    wanted = out_dtype or x.dtype
    found = torch.matmul(x.float(), matrix.float())
    if out is None:
        return found.to(wanted)
    assert out.dtype == wanted
    return out.copy_(found)
