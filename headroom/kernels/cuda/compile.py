"""Compiles CUDA C++ sources for this machine's GPU with NVRTC, and keeps the code on disk."""

import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
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

CODE = CodeCache()  # global, as the loaded kernels are
SOURCES = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PLAIN_SHARED_BYTES = 48 << 10  # dynamic shared memory of a block without that attribute
_MOST_THREADS = 16  # that compile at the same time; each takes about 30 MiB

T = TypeVar("T")
Defines = tuple[tuple[str, int], ...]  # macros and their values, sorted
Code = tuple[str, Mapping[str, int]]  # a source and the macros that it is compiled with

_OWN = OwnLaunch()
# Kernels by source, name, GPU, and the macros' names and values in the order in which they were
# given.
_FOUND: dict[tuple[object, ...], "CudaKernel"] = {}
_LOADED: set[tuple[str, int]] = set()  # (key of loaded code, GPU)


class CudaKernel:
    """One compiled kernel; it is launched on the current stream and can be captured in a graph."""

    def __init__(self, name: str, function: ctypes.c_void_p, early: bool, device: int = 0) -> None:
        self._name = name
        self._function, self._device = function, device
        self._early = early  # whether the GPU can start a kernel before the one before it ends
        self._shared_bytes = 0  # dynamic bytes set so far

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Launch with tensors as pointers, None as a null pointer, ints and floats as 32 bits.

        With `early`, the kernel may start while the one before it still runs. Its code must then
        wait before it touches memory that kernels of the step write, see early.cuh.
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
    """Return why no CUDA kernel runs a case, whatever its types; None if one may."""
    if case.device != "cuda":
        return f"runs on cuda, not {case.device}"
    if case.reference:
        return "only reference kernels were asked for"
    if case.triton:
        return "Triton's kernels were asked for"
    return None


@cache
def _asked(ask: Callable[[torch.device], T], device: torch.device) -> T:
    """Return `ask(device)`, computed once per process: torch takes microseconds for each call."""
    return ask(device)


def properties_of(device: torch.device) -> Any:
    """Return torch's properties of a GPU."""
    return _asked(torch.cuda.get_device_properties, device)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU: (9, 0) for sm_90."""
    found: tuple[int, int] = _asked(torch.cuda.get_device_capability, device)
    return found


def shared_bytes_of(device: torch.device) -> int:
    """Return the most bytes of shared memory that a block may have on a GPU."""
    properties = properties_of(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _PLAIN_SHARED_BYTES))


def compile_kernel(source: str, name: str, defines: Mapping[str, int] | None = None) -> CudaKernel:
    """Return a kernel of a source file, compiled with the given macros."""
    # Called at every launch, so macros are not sorted here: that would take longest.
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
    """Return the module with all kernels of a source."""
    return load_code(source, with_macros(source, dict(defines)), _sm_of(device), device)


def _sm_of(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def load_code(source: str, text: str, sm: int, device: int) -> ctypes.c_void_p:
    """Load the machine code of a source text onto a GPU, from the cache or compiled now."""
    key = _key_of(text, sm)
    module = _load_kept(source, key, device)
    if module is None:
        code = open_nvrtc().compile(text, source, f"sm_{sm}")
        CODE.save(key, code)
        module = load_module(code, device)
    _LOADED.add((key, device))
    return module


def _key_of(text: str, sm: int) -> str:
    return code_key(text, f"sm_{sm}", open_nvrtc().version, *FLAGS)


def _load_kept(source: str, key: str, device: int) -> ctypes.c_void_p | None:
    if (code := CODE.load(key)) is not None:
        try:
            return load_module(code, device)
        except KernelError as error:  # the driver is older than the one that the code was made with
            if is_out_of_memory(error):
                raise
            log.debug("kernels: cached code of %s does not load: %s", source, error)
    return None


def compile_ahead(wanted: Iterable[Code]) -> None:
    """Compile sources for the current GPU in threads, unless their code is cached or loaded.

    This only saves time. A source that does not compile here raises its error when it is used.
    """
    started = time.perf_counter()
    try:
        device = current_device()
        sm = _sm_of(device)
        missing = _missing(wanted, sm, device)
        most = max(1, min(len(missing), _cores(), _MOST_THREADS))
        with ThreadPoolExecutor(most, "compile") as threads:
            count = sum(threads.map(partial(_compile_one, sm), missing))
    except Exception as error:  # no error may stop the start of an engine
        log.debug("kernels: nothing is compiled ahead: %s", error)
        return
    if count:
        log.info("kernels: %d compiled ahead in %.1f s", count, time.perf_counter() - started)


def _missing(wanted: Iterable[Code], sm: int, device: int) -> list[tuple[str, str, str]]:
    """Return (key, source, text) of each source that is neither loaded on this GPU nor cached."""
    found = {}
    # Products of many rows come first: they take longest, so that all threads end about together.
    codes = {(source, tuple(sorted(macros.items()))) for source, macros in wanted}
    for source, macros in sorted(codes, reverse=True):
        text = with_macros(source, dict(macros))
        key = _key_of(text, sm)
        if (key, device) not in _LOADED and not CODE.has(key):
            found[key] = (key, source, text)
    return list(found.values())


def _compile_one(sm: int, wanted: tuple[str, str, str]) -> bool:
    """Compile a source and keep its code; return whether that worked."""
    key, source, text = wanted
    try:
        CODE.hold(key, open_nvrtc().compile(text, source, f"sm_{sm}"))
    except Exception as error:
        log.debug("kernels: %s is not compiled ahead: %s", source, error)
        return False
    return True


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def with_macros(source: str, defines: Mapping[str, int]) -> str:
    """Return the text that the compiler reads: macros, then the source with its includes."""
    macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    return macros + read_source(source)


def read_source(name: str) -> str:
    """Return the text of a source with its included files inserted."""
    text = (SOURCES / name).read_text()
    return _INCLUDE.sub(lambda match: read_source(match[1]), text)
