"""NVIDIA's driver, as far as kernels need it: modules of machine code and their functions."""

import ctypes
from functools import cache

from headroom.errors import KernelError

_NO_CONTEXT = 201  # what the driver answers to a thread that has none
_FOR_ALL_KERNELS = 3  # pinned for all GPUs, and at addresses that kernels can read


@cache
def driver() -> ctypes.CDLL:
    """Return the driver's library, which every machine with a GPU of NVIDIA has."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raise what has failed, and why, unless the driver says that all is well."""
    if reason := _reason(status):
        raise KernelError(f"{what}: {reason}.")


def lock_pages(address: int, size: int, device: int) -> str:
    """Lock host memory in place for GPUs; return why that was refused, "" if it was not.

    By the driver itself: a refusal of the runtime library would be taken for one of torch's next
    kernel.
    """
    _make_current(device)
    place, count = ctypes.c_void_p(address), ctypes.c_size_t(size)
    return _reason(driver().cuMemHostRegister_v2(place, count, _FOR_ALL_KERNELS))


def unlock_pages(address: int, device: int) -> str:
    """Give back what `lock_pages` has locked; return why that failed, "" if it did not."""
    _make_current(device)
    return _reason(driver().cuMemHostUnregister(ctypes.c_void_p(address)))


def copy_beside(to: int, source: int, size: int, stream: int, device: int) -> None:
    """Copy bytes to or from a GPU in the order of a stream; pinned memory holds nobody up."""
    arguments = (
        *(ctypes.c_void_p(to), ctypes.c_void_p(source)),
        *(ctypes.c_size_t(size), ctypes.c_void_p(stream)),
    )
    status = driver().cuMemcpyAsync(*arguments)
    if status == _NO_CONTEXT:  # a thread in which torch has not used the GPU yet
        _make_current(device)
        status = driver().cuMemcpyAsync(*arguments)
    if status:
        check(status, f"{size} bytes could not be copied")


def load_module(code: bytes, device: int) -> ctypes.c_void_p:
    """Load machine code onto a GPU, for as long as this process runs."""
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
    """Return the driver's words for what went wrong, "" where nothing did."""
    if status == 0:
        return ""
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {status}"


def _make_current(device: int) -> None:
    """Give this thread the context that torch uses on a GPU, which torch makes only at need."""
    cuda, current, wanted = driver(), ctypes.c_int(), ctypes.c_int()
    check(cuda.cuInit(0), "CUDA does not start")
    check(cuda.cuDeviceGet(ctypes.byref(wanted), device), f"There is no cuda:{device}")
    if cuda.cuCtxGetDevice(ctypes.byref(current)) == 0 and current.value == wanted.value:
        return
    context = ctypes.c_void_p()
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), wanted)
    check(status, f"cuda:{device} does not start")
    check(cuda.cuCtxSetCurrent(context), f"cuda:{device} does not start")
