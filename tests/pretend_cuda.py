"""A GPU that is not there: tensors in host memory that say they are on `cuda`.

Every operation is checked as a GPU would check it: tensors of both places do not meet. Kernels
that the C++ compiler can build run as they are; the others are stood in for.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from headroom.experts import copies
from tests.pinned import is_pinned, pretend_pinning

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Both places may meet in these.
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
COPIES = {torch.Tensor.copy_, *MOVES}
# What these give is of no device.
LEAVES = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.data_ptr}
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class PretendedError(AssertionError):
    """Something that a GPU would refuse."""


class OnCuda(torch.Tensor):
    """A tensor of the pretended GPU."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


class Pretence(TorchFunctionMode):
    """Sees every call of torch, those that make tensors included."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return run(func, args, kwargs or {})


def is_cuda(x: object) -> bool:
    """Tell whether something names the GPU or lies there."""
    if isinstance(x, torch.Tensor):
        return isinstance(x, OnCuda)
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return isinstance(x, str) and x.startswith("cuda")


def plain(x: Any) -> Any:
    """Return a tensor as the host sees it."""
    return x.as_subclass(torch.Tensor) if isinstance(x, OnCuda) else x


def there(x: Any) -> Any:
    """Return a tensor as the GPU sees it."""
    return x.as_subclass(OnCuda) if isinstance(x, torch.Tensor) else x


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check one call, run it in host memory, and say where its result is."""
    with torch._C.DisableTorchFunction():
        if func is torch.device:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return CUDA if isinstance(args[0], OnCuda) else args[0].device
        if func == torch.Tensor.is_cuda.__get__:
            return isinstance(args[0], OnCuda)
        _check(func, args, kwargs)
        to_cuda = _goes_to_cuda(func, args, kwargs)
        moved = tree_map(lambda x: CPU if is_cuda(x) and not isinstance(x, OnCuda) else plain(x),
                         (args, kwargs))  # fmt: skip
        found = _call(func, *moved)
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu) and to_cuda != is_cuda(
            args[0]
        ):
            found = found.clone()  # another memory
        return tree_map(there, found) if to_cuda else found


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs.pop("pin_memory", None)
    if func is torch.Tensor.pin_memory:  # all of the host's memory is, here
        return args[0].clone()
    return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def _goes_to_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("device") is not None:
        return is_cuda(kwargs["device"])
    if func is torch.Tensor.cuda:
        return True
    if func in LEAVES:
        return False
    if func is torch.Tensor.to:
        for target in args[1:]:
            if isinstance(target, (str, torch.device, torch.Tensor)):
                return is_cuda(target)
    return any(isinstance(x, OnCuda) for x in tree_flatten((args, kwargs))[0])


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func is torch.Tensor.numpy and isinstance(args[0], OnCuda):
        raise PretendedError("numpy() of a tensor on a GPU")
    if func in COPIES:
        return
    if func in INDEXED and isinstance(args[0], OnCuda):
        by_tensor = any(isinstance(x, torch.Tensor) for x in tree_flatten(args[1])[0])
        args = args[2:] if by_tensor else ()  # places may be the host's, and slices are copied to
        args = (torch.empty(1).as_subclass(OnCuda), *args)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    hosted = [x for x in tensors if not isinstance(x, OnCuda) and x.dim()]
    if hosted and len(hosted) < len([x for x in tensors if x.dim()]):
        raise PretendedError(f"{getattr(func, '__name__', func)} of tensors of both places")


@contextmanager
def pretend_cuda(monkeypatch: pytest.MonkeyPatch, sm: int = 90) -> Iterator[None]:
    """Let this machine have a GPU, for as long as the block runs."""
    shared = {75: (64 << 10, 64 << 10), 90: (227 << 10, 228 << 10)}[sm]
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=shared[0],
        shared_memory_per_multiprocessor=shared[1],
        major=sm // 10,
        minor=sm % 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    # Its work is done when it is asked for: streams and events have nothing to wait for.
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, **named: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        copies, "copy_beside", lambda to, source, size, *where: ctypes.memmove(to, source, size)
    )
    pretend_pinning(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    with Pretence():
        yield


def kernels_on_cpu(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiler of kernels for the host take tensors of the pretended GPU, and no others."""

    def compiled(source: str, name: str, defines: dict[str, int] | None = None) -> Any:
        kernel = compile_kernel(source, name, defines)

        def launch(
            grid: Any, block: Any, args: Any, shared_bytes: int = 0, early: bool = False
        ) -> None:
            given = [x for x in args if isinstance(x, torch.Tensor)]
            if not all(isinstance(x, OnCuda) or is_pinned(x) for x in given):
                raise PretendedError(f"{source}:{name} is given a tensor of the host")
            kernel(grid, block, [plain(x) for x in args], shared_bytes)

        return launch

    return compiled
