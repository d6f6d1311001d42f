"""Compiles CUDA C++ sources for this machine's GPU with NVRTC, and keeps the code on disk."""

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from headroom.errors import KernelError, is_out_of_memory
from headroom.kernels.cuda import scratch
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
# Sources that take longest to compile, the longest first (3.4, 1.1, 0.8 and 0.6 s of one core for
# Qwen3.5-35B-A3B, NVRTC 12.8, 2026-11). They begin first, so that all threads end about together.
_SLOWEST = (
    *("delta_chunks.cu", "sorted.cu", "decode.cu", "experts.cu", "shared_picks.cu", "matmul.cu"),
)

T = TypeVar("T")
Defines = tuple[tuple[str, int], ...]  # macros and their values, sorted
Code = tuple[str, Mapping[str, int]]  # a source and the macros that it is compiled with

_OWN = OwnLaunch()
# Kernels by source, name, GPU, and the macros' names and values in the order in which they were
# given.
_FOUND: dict[tuple[object, ...], "CudaKernel"] = {}


@dataclass(frozen=True, slots=True)
class WantedKernel:
    """A kernel that steps ask for."""

    source: str
    name: str
    defines: Defines


class _Rehearsal(threading.local):
    """What the kernels are that a thread asks for in a rehearsal; None: it launches them."""

    wanted: "set[WantedKernel] | None" = None


_REHEARSAL = _Rehearsal()


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


class _RehearsedKernel(CudaKernel):
    """Stands for any kernel in a rehearsal, and is never launched."""

    def __init__(self) -> None:
        super().__init__("rehearsed", ctypes.c_void_p(), early=False)

    def __call__(self, *launch: object, **more: object) -> None:
        """Do nothing."""


_REHEARSED = _RehearsedKernel()


@contextmanager
def rehearsal() -> Iterator[set[WantedKernel]]:
    """Yield a set that gets every kernel that this thread asks for within the block.

    No kernel of ours is launched there, and none is compiled. Operations of torch run, so buffers
    of integers must not hold what torch could take for a row: `scratch` fills them with zeros.
    """
    before = _REHEARSAL.wanted
    wanted: set[WantedKernel] = set()
    _REHEARSAL.wanted = wanted
    try:
        with scratch.zeroed():
            yield wanted
    finally:
        _REHEARSAL.wanted = before


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
    if (wanted := _REHEARSAL.wanted) is not None:
        wanted.add(WantedKernel(source, name, tuple(sorted(given.items()))))
        return _REHEARSED
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


def compile_ahead(
    wanted: Iterable[WantedKernel], report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Load kernels onto the current GPU in threads, and compile those whose code is not cached.

    This only saves time. A kernel that does not compile here raises its error when it is used.
    `report` is told how many sources are done, and how many there are.
    """
    started = time.perf_counter()
    names: dict[tuple[str, Defines], set[str]] = {}
    for kernel in wanted:
        names.setdefault((kernel.source, kernel.defines), set()).add(kernel.name)
    if not names:
        return
    device = current_device()

    def load(code: tuple[str, Defines]) -> bool:
        try:
            for name in names[code]:
                _find_kernel(code[0], name, code[1], device)
        except Exception as error:  # no error may stop the start of an engine
            log.debug("kernels: %s is not compiled ahead: %s", code[0], error)
            return False
        return True

    most = max(1, min(len(names), _cores(), _MOST_THREADS))
    with ThreadPoolExecutor(most, "compile") as threads:
        jobs = [threads.submit(load, code) for code in sorted(names, key=_begins)]
        for done, _ in enumerate(as_completed(jobs)):
            report(done, len(jobs))  # the caller goes on with the last one
    count, seconds = sum(job.result() for job in jobs), time.perf_counter() - started
    log.info("kernels: %d sources ready in %.1f s", count, seconds)


def _begins(code: tuple[str, Defines]) -> tuple[int, str, Defines]:
    """Return the place of a source in the order of compilation: the slowest begin first."""
    source, defines = code
    place = _SLOWEST.index(source) if source in _SLOWEST else len(_SLOWEST)
    # Of products, those of many rows take longest: they have the larger macros.
    return place, source, tuple((name, -value) for name, value in defines)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def with_macros(source: str, defines: Mapping[str, int]) -> str:
    """Return the text that the compiler reads: macros, then the source with its includes."""
    macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    return macros + read_source(source)


@cache
def read_source(name: str) -> str:
    """Return the text of a source with its included files inserted."""
    text = (SOURCES / name).read_text()
    return _INCLUDE.sub(lambda match: read_source(match[1]), text)
