"""Calls of NVIDIA's driver library: modules of machine code, pinned memory, copies."""

import ctypes
from functools import cache

from headroom.errors import KernelError

_NO_CONTEXT = 201  # the driver's status for a thread without a CUDA context
_FOR_ALL_KERNELS = 3  # flags: pinned for all GPUs, and mapped so that kernels can read it


@cache
def driver() -> ctypes.CDLL:
    """Return the driver's library, which every machine with an NVIDIA GPU has."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raise a KernelError with `what` failed and the driver's reason, unless `status` is 0."""
    if reason := _reason(status):
        raise KernelError(f"{what}: {reason}.")


def lock_pages(address: int, size: int, device: int) -> str:
    """Pin host memory for all GPUs; return why the driver refused, "" if it did not.

    The driver is called directly: after a refusal by the CUDA runtime, torch would report that
    error for its next kernel.
    """
    _make_current(device)
    place, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
    return _reason(driver().cuMemHostRegister_v2(place, count, _FOR_ALL_KERNELS))


def unlock_pages(address: int, device: int) -> str:
    """Unpin memory that `lock_pages` has pinned; return why that failed, "" if it did not."""
    _make_current(device)
    return _reason(driver().cuMemHostUnregister(ctypes.c_void_p(address)))


def copy_async(to: int, source: int, size: int, stream: int, device: int) -> None:
    """Enqueue a copy to or from a GPU on a stream; with pinned memory the call does not wait."""
    arguments = (
        *(ctypes.c_void_p(to), ctypes.c_void_p(source)),
        *(ctypes.c_size_t(size), ctypes.c_void_p(stream)),
    )
    status = driver().cuMemcpyAsync(*arguments)
    if status == _NO_CONTEXT:  # torch has not used the GPU in this thread yet
        _make_current(device)
        status = driver().cuMemcpyAsync(*arguments)
    if status:
        check(status, f"{size} bytes could not be copied")


def load_module(code: bytes, device: int) -> ctypes.c_void_p:
    """Load machine code onto a GPU; it stays until the process ends."""
    _make_current(device)
    module = ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), code), "Kernels could not be loaded")
    return module


def find_function(module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
    """Return a kernel of a module."""
    function = ctypes.c_void_p()
    status = driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    check(status, f"There is no kernel {name}")
    return function


def _reason(status: int) -> str:
    """Return the driver's text for a status; "" for success."""
    if status == 0:
        return ""
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {status}"


def _make_current(device: int) -> None:
    """Make torch's CUDA context of a GPU current in this thread; torch creates it on first use."""
    cuda, current, wanted = driver(), ctypes.c_int(), ctypes.c_int()
    check(cuda.cuInit(0), "CUDA does not start")
    check(cuda.cuDeviceGet(ctypes.byref(wanted), device), f"There is no cuda:{device}")
    if cuda.cuCtxGetDevice(ctypes.byref(current)) == 0 and current.value == wanted.value:
        return
    context = ctypes.c_void_p()
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), wanted)
    check(status, f"cuda:{device} does not start")
    check(cuda.cuCtxSetCurrent(context), f"cuda:{device} does not start")
