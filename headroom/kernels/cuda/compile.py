"""CUDA C++ sources compiled for the GPU at hand by NVRTC, each once and then kept on disk."""

import ctypes
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from headroom.errors import KernelError, is_out_of_memory
from headroom.kernels.cuda.code_cache import CodeCache, code_key
from headroom.kernels.cuda.driver import check, driver, find_function, load_module
from headroom.kernels.cuda.launch import Argument, OwnLaunch, current_device, stream_of
from headroom.kernels.cuda.nvrtc import FLAGS, open_nvrtc
from headroom.kernels.ops import Case

log = logging.getLogger(__name__)

CODE = CodeCache()  # of this process, as the compiled kernels are
SOURCES = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_MAX_DYNAMIC_SHARED = 8  # the driver's number of this attribute of a function
_PLAIN_SHARED_BYTES = 48 << 10  # what a block may have without asking

T = TypeVar("T")
Defines = tuple[tuple[str, int], ...]  # macros and their values, sorted

_OWN = OwnLaunch()
# Kernels by source, name, GPU, macros in the order that they were given in, and their values.
_FOUND: dict[tuple[object, ...], "CudaKernel"] = {}


class CudaKernel:
    """One compiled kernel; calls go to the current stream and may be captured in a graph."""

    def __init__(self, name: str, function: ctypes.c_void_p, early: bool, device: int = 0) -> None:
        self._name = name
        self._function, self._device = function, device
        self._early = early  # whether the GPU can start a kernel while another runs out
        self._shared_bytes = 0  # that were asked for: it may have more at fixed places

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
        before it touches what kernels of the step write, see early.cuh.
        """
        if 0 in grid:
            return
        if shared_bytes > self._shared_bytes:
            self._check(
                driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
            )
            self._shared_bytes = shared_bytes
        launch = _OWN.launch
        arguments = launch.arguments
        arguments.fill(args)
        launch.set(grid, block, shared_bytes, stream_of(self._device), early and self._early)
        self._check(
            driver().cuLaunchKernelEx(launch.config, self._function, arguments.places, None)
        )

    def _check(self, status: int) -> None:
        if status:
            check(status, f"The CUDA kernel {self._name} could not be started")


def refuses_device(case: Case) -> str | None:
    """Say why no CUDA kernel runs a case, whatever its types."""
    if case.device != "cuda":
        return f"runs on cuda, not {case.device}"
    if case.reference:
        return "plain kernels were asked for"
    if case.triton:
        return "Triton's kernels were asked for"
    return None


@cache
def _asked(ask: Callable[[torch.device], T], device: torch.device) -> T:
    """What does not change as long as a process runs; torch takes microseconds for every answer."""
    return ask(device)


def properties_of(device: torch.device) -> Any:
    """Return what torch tells of a GPU."""
    return _asked(torch.cuda.get_device_properties, device)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the generation of a GPU: 9 and 0 of sm_90."""
    found: tuple[int, int] = _asked(torch.cuda.get_device_capability, device)
    return found


def shared_bytes_of(device: torch.device) -> int:
    """Return the most bytes of shared memory that a block may have on a GPU."""
    properties = properties_of(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _PLAIN_SHARED_BYTES))


def compile_kernel(source: str, name: str, defines: Mapping[str, int] | None = None) -> CudaKernel:
    """Return a kernel of a source file, compiled with the given macros."""
    # Looked for at every launch: sorting macros would take longer than all else here.
    given = defines or {}
    device = current_device()
    key = (source, name, device, *given, *given.values())
    kernel = _FOUND.get(key)
    if kernel is None:
        kernel = _find_kernel(source, name, tuple(sorted(given.items())), device)
        _FOUND[key] = kernel
    return kernel


@cache
def _find_kernel(source: str, name: str, defines: Defines, device: int) -> CudaKernel:
    module = _load_source(source, defines, device)
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return CudaKernel(f"{source}:{name}", find_function(module, name), early, device)


@cache
def _load_source(source: str, defines: Defines, device: int) -> ctypes.c_void_p:
    """Return the module of all kernels of a source, which the compiler makes at once."""
    major, minor = torch.cuda.get_device_capability(device)
    text = with_macros(source, dict(defines))
    return load_code(source, text, 10 * major + minor, device)


def load_code(source: str, text: str, sm: int, device: int) -> ctypes.c_void_p:
    """Load a text's machine code onto a GPU: as kept from earlier days, or compiled now."""
    nvrtc = open_nvrtc()
    target = f"sm_{sm}"
    key = code_key(text, target, nvrtc.version, *FLAGS)
    if (code := CODE.load(key)) is not None:
        try:
            return load_module(code, device)
        except KernelError as error:  # a driver that is older than the one it was kept under
            if is_out_of_memory(error):
                raise
            log.debug("kernels: kept code of %s does not load: %s", source, error)
    code = nvrtc.compile(text, source, target)
    CODE.save(key, code)
    return load_module(code, device)


def with_macros(source: str, defines: Mapping[str, int]) -> str:
    """Return all that the compiler reads of a source."""
    macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    return macros + read_source(source)


def read_source(name: str) -> str:
    """Return a source with the files that it includes in their places."""
    text = (SOURCES / name).read_text()
    return _INCLUDE.sub(lambda match: read_source(match[1]), text)
