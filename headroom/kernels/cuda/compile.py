"""CUDA C++ sources compiled for the GPU at hand by NVRTC, each once in a process."""

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from headroom.errors import KernelError
from headroom.kernels.ops import Case

SOURCES = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_MAX_DYNAMIC_SHARED = 8  # the driver's number of this attribute of a function
_PLAIN_SHARED_BYTES = 48 << 10  # what a block may have without asking

_MAY_START_EARLY = 6  # the driver's number of programmatic stream serialization

Argument = torch.Tensor | int | float | None


class _Attribute(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16))

    def __init__(self, number: int, value: int) -> None:
        super().__init__(number, 0, (value,))


class _Config(ctypes.Structure):
    """How the driver is told to launch a kernel."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaKernel:
    """One compiled kernel; calls go to the current stream and may be captured in a graph."""

    def __init__(self, name: str, module: object, function: ctypes.c_void_p, early: bool) -> None:
        self._name = name
        self._module = module  # unloaded with the last reference to it
        self._function = function
        self._early = early  # whether the GPU can start a kernel while another runs out
        self._shared_bytes = _PLAIN_SHARED_BYTES

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Launch with tensors as pointers, None as a null pointer, ints and floats as 32 bits.

        A kernel may start `early`, while the one before it still runs, if it waits for that one
        before it touches anything but weights.
        """
        if 0 in grid:
            return
        if shared_bytes > self._shared_bytes:
            self._check(
                _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
            )
            self._shared_bytes = shared_bytes
        values = [_value(argument) for argument in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        attribute = _Attribute(_MAY_START_EARLY, 1)
        config = _Config(
            (*grid, 1, 1)[:3], (*block, 1, 1)[:3], shared_bytes, stream, ctypes.pointer(attribute),
            int(early and self._early),
        )  # fmt: skip
        self._check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        )

    def _check(self, status: int) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {status}"
        raise KernelError(f"The CUDA kernel {self._name} could not be started: {reason}.")


def refuses_device(case: Case) -> str | None:
    """Say why no CUDA kernel runs a case, whatever its types."""
    if case.device != "cuda":
        return f"runs on cuda, not {case.device}"
    if case.reference:
        return "plain kernels were asked for"
    if case.triton:
        return "Triton's kernels were asked for"
    return None


def shared_bytes_of(device: torch.device) -> int:
    """Return the most bytes of shared memory that a block may have on a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _PLAIN_SHARED_BYTES))


def compile_kernel(source: str, name: str, defines: Mapping[str, int] | None = None) -> CudaKernel:
    """Return a kernel of a source file, compiled with the given macros."""
    key = tuple(sorted((defines or {}).items()))
    return _compile(source, name, key, torch.cuda.current_device())


@cache
def _compile(
    source: str, name: str, defines: tuple[tuple[str, int], ...], device: int
) -> CudaKernel:
    macros = "".join(f"#define {key} {value}\n" for key, value in defines)
    major, minor = torch.cuda.get_device_capability(device)
    try:
        compiled = torch.cuda._compile_kernel(
            macros + read_source(source), name, compute_capability=f"{major}{minor}"
        )
    except RuntimeError as error:
        raise KernelError(f"{source} does not compile for sm_{major}{minor}: {error}") from error
    return CudaKernel(f"{source}:{name}", compiled.module, compiled.func, major >= 9)


def read_source(name: str) -> str:
    """Return a source with the files that it includes in their places."""
    text = (SOURCES / name).read_text()
    return _INCLUDE.sub(lambda match: read_source(match[1]), text)


def _value(argument: Argument) -> "ctypes.c_void_p | ctypes.c_int | ctypes.c_float":
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
