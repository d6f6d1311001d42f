"""Tensors of the stand-in GPU: they lie in host memory and say that they are on `cuda`.

Every call of torch is checked as a GPU would check it: tensors of the host and of the GPU do not
meet in one operation. Operations run at once, but copies that do not hold up the host run late:
when an operation or a wait comes after them in their stream.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.stand_in.streams import Queues, Work

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Tensors of the host and of the GPU may meet in these.
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
COPIES = {torch.Tensor.copy_, *MOVES}
PINS = {torch.Tensor.pin_memory, torch.Tensor.cuda}  # the stand-in has ways of its own for these
# The host waits for what these return, and it is not on the GPU.
LEAVES = {torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy}
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_T = torch.Tensor
# The result is a value, or its shape depends on values: the host must wait for the GPU.
WAITS = {
    *(_T.tolist, _T.item, _T.cpu, _T.numpy, _T.nonzero, torch.nonzero, torch.argwhere),
    *(_T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__contains__),
    *(torch.masked_select, _T.masked_select, torch.bincount, _T.bincount),
    *(torch.unique, _T.unique, torch.equal, _T.equal, torch.allclose),
}
# These touch no values, so that late copies need not run before them.
NO_VALUES = {
    *("data_ptr", "untyped_storage", "storage_offset", "element_size", "size", "stride", "dim"),
    *("numel", "__len__", "is_contiguous", "view", "unbind", "split", "chunk", "narrow", "select"),
    *("squeeze", "unsqueeze", "expand", "permute", "transpose", "t", "detach", "as_subclass"),
    *("empty", "empty_like", "new_empty", "is_pinned", "is_floating_point", "__hash__"),
}


class WrongDeviceError(AssertionError):
    """Something that a GPU would refuse."""


class WaitError(AssertionError):
    """The host would have waited for the GPU where it must not."""


class DeviceTensor(torch.Tensor):
    """A tensor of the stand-in GPU."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


class StandInMode(TorchFunctionMode):
    """Sees every call of torch in a thread, those that make tensors included."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return run(func, args, kwargs or {})


@dataclass(eq=False)
class Graph:
    """Operations that ran once and may run again on the same memory."""

    operations: list[Callable[[], None]] = field(default_factory=list)

    def replay(self) -> None:
        """Run all operations in order."""
        Queues.current().current_stream().drain()
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for operation in self.operations:
                operation()


class Capture:
    """Records what a thread runs into a graph; it runs while it is recorded, too."""

    recording: "Graph | None" = None

    def __init__(self, graph: Graph, pool: object = None, **how: object) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        assert Capture.recording is None
        Capture.recording = self._graph

    def __exit__(self, *error: object) -> None:
        Capture.recording = None


@contextmanager
def no_waits() -> Iterator[None]:
    """Refuse every operation that lets the host wait for the GPU."""
    global _refuses_waits
    _refuses_waits = True
    try:
        yield
    finally:
        _refuses_waits = False


_refuses_waits = False


def is_cuda(x: object) -> bool:
    """Tell whether something names the GPU or lies there."""
    if isinstance(x, torch.Tensor):
        return isinstance(x, DeviceTensor)
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return isinstance(x, str) and x.startswith("cuda")


def plain(x: Any) -> Any:
    """Return a tensor as the host sees it."""
    return x.as_subclass(torch.Tensor) if isinstance(x, DeviceTensor) else x


def on_gpu(x: Any) -> Any:
    """Return a tensor as the GPU sees it."""
    return x.as_subclass(DeviceTensor) if isinstance(x, torch.Tensor) else x


def launch(name: str, kernel: Callable[[], None]) -> None:
    """Run a kernel in the order of the current stream, and record it if a graph is captured."""

    def operation() -> None:
        Queues.current().note_kernel(name)
        kernel()

    Queues.current().current_stream().drain()
    operation()
    if Capture.recording is not None:
        Capture.recording.operations.append(operation)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check one call, run it in host memory, and mark its result as the GPU's if it is."""
    with torch._C.DisableTorchFunction():
        if func is torch.device:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return CUDA if isinstance(args[0], DeviceTensor) else args[0].device
        if func == torch.Tensor.is_cuda.__get__:
            return isinstance(args[0], DeviceTensor)
        if func not in PINS and not kwargs.get("pin_memory") and _all_on_host(args, kwargs):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # shapes and types ask nothing of a GPU
            found = func(*map(plain, args))
            return on_gpu(found) if isinstance(args[0], DeviceTensor) else found
        _check(func, args, kwargs)
        if func is torch.Tensor.copy_ and _is_late(args, kwargs):
            _copy_late(args[0], args[1])
            return args[0]
        to_cuda = _goes_to_cuda(func, args, kwargs)
        values = _has_values(func, args)
        if values and (to_cuda or _any_on_gpu(args, kwargs)):
            _before_operation(func, args)
        moved = tree_map(
            lambda x: CPU if is_cuda(x) and not isinstance(x, DeviceTensor) else plain(x),
            (args, kwargs),
        )
        found = _call(func, *moved)
        if func in MOVES and to_cuda != is_cuda(args[0]):
            found = found.clone()  # another memory
        if to_cuda and Queues.current().memory_bytes is not None:
            _take_memory(found, moved)
        if to_cuda and values and Capture.recording is not None:
            Capture.recording.operations.append(_again(func, moved, found))
        return tree_map(on_gpu, found) if to_cuda else found


def _take_memory(found: Any, given: Any) -> None:
    """Count the memory of results that share none with what an operation was given."""
    queues = Queues.current()
    known = {x.untyped_storage().data_ptr() for x in _tensors(given)}
    for x in _tensors(found):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            queues.take(storage.nbytes())
            weakref.finalize(storage, queues.give_back, storage.nbytes())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def _all_on_host(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call names no GPU and is given none of its tensors."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            if not _all_on_host(x, {}):
                return False
        elif is_cuda(x):
            return False
    return True


def _has_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an operation reads or writes values, not only shapes and addresses."""
    if func is torch.Tensor.__getitem__:  # a slice is a view
        return any(isinstance(x, torch.Tensor) for x in tree_flatten(args[1])[0])
    return getattr(func, "__name__", "") not in NO_VALUES


def _any_on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, DeviceTensor) for x in tree_flatten((args, kwargs))[0])


def _before_operation(func: Any, args: tuple[Any, ...]) -> None:
    """Let the copies run that come before an operation in its stream."""
    Queues.current().current_stream().drain()
    if (_refuses_waits or Capture.recording is not None) and _waits(func, args):
        raise WaitError(f"{getattr(func, '__name__', func)} waits for the GPU")


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an operation lets the host wait for values of the GPU."""
    if func is torch.Tensor.to:
        return isinstance(args[0], DeviceTensor) and not _goes_to_cuda(func, args, {})
    if func in INDEXED:  # how many rows a mask leaves is known when it is computed
        indices = [x for x in tree_flatten(args[1])[0] if isinstance(x, torch.Tensor)]
        return any(x.dtype == torch.bool for x in indices)
    return func in WAITS


def _again(func: Any, moved: tuple[Any, Any], found: Any) -> Callable[[], None]:
    """Return what runs an operation anew and writes its result where the first result is."""
    results = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]

    def operation() -> None:
        fresh = _call(func, *moved)
        for old, new in zip(results, tree_flatten(fresh)[0], strict=False):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return operation


def _is_late(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a copy goes over the link and does not hold up the host."""
    waits_not = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
    crosses = isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
    return bool(waits_not) and crosses and Capture.recording is None


def _copy_late(out: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy: what the host writes to its source too early is copied, too.

    A copy to the host takes what the GPU has computed so far, and writes it when it runs.
    """
    queues = Queues.current()
    queues.count()
    stream = queues.current_stream()
    if isinstance(source, DeviceTensor):
        stream.drain()
        source = plain(source).clone()
        out.view(torch.uint8).fill_(0xFF) if out.is_contiguous() and out.dim() else None
    stream.queue(_write(plain(out), plain(source)))


def _write(out: torch.Tensor, source: torch.Tensor) -> Work:
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        out.copy_(source)
    yield


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pins = kwargs.pop("pin_memory", False)
    if func is torch.Tensor.pin_memory:
        return _pinned(args[0].clone())
    found = args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
    return _pinned(found) if pins else found


def _pinned(x: torch.Tensor) -> torch.Tensor:
    if Queues.current().refuses_to_pin:
        raise RuntimeError("CUDA error: OS call failed")
    Queues.current().pinned_by_torch[x.data_ptr()] = x.nbytes
    return x


def _goes_to_cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("device") is not None:
        return is_cuda(kwargs["device"])
    if func is torch.Tensor.cuda:
        return True
    if func in LEAVES or func is torch.Tensor.data_ptr:
        return False
    if func is torch.Tensor.to:
        for target in args[1:]:
            if isinstance(target, (str, torch.device, torch.Tensor)):
                return is_cuda(target)
    return _any_on_gpu(args, kwargs)


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func is torch.Tensor.numpy and isinstance(args[0], DeviceTensor):
        raise WrongDeviceError("numpy() of a tensor on a GPU")
    if func in COPIES:
        return
    if func in INDEXED and isinstance(args[0], DeviceTensor):
        by_tensor = any(isinstance(x, torch.Tensor) for x in tree_flatten(args[1])[0])
        args = args[2:] if by_tensor else ()  # indices may be the host's, and slices are copied to
        args = (torch.empty(1).as_subclass(DeviceTensor), *args)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    hosted = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim()]
    if hosted and len(hosted) < len([x for x in tensors if x.dim()]):
        name = getattr(func, "__name__", func)
        raise WrongDeviceError(f"{name} of tensors of the host and of the GPU")
