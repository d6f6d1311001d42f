"""CUDA sources compiled by the C++ compiler at hand and run on the CPU, one thread at a time.

It shows that a kernel's arithmetic, indices and barriers are right; speed and races between
blocks only show on a GPU. Inline assembly is left out or has a stand-in in cuda_on_cpu.h.
"""

import atexit
import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from headroom.kernels.cuda import compile as cuda
from headroom.kernels.cuda.launch import Argument, Arguments

HERE, HEADER = Path(__file__).parent, "cuda_on_cpu.h"
COMPILER = shutil.which("g++")
SHARED_FLOATS = 1 << 16  # of cuda_on_cpu.h
CPU_FLAGS = Path("/proc/cpuinfo")


@cache
def build_folder() -> Path:
    """Where the compiled sources of this process go, the header among them."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_on_cpu_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Most of a small kernel's time would go into the header.
    _compile("-x", "c++-header", str(HERE / HEADER), "-o", str(folder / f"{HEADER}.gch"))
    return folder


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    options = ("-std=c++17", "-O1", "-w", "-fPIC", *_half_instructions())
    subprocess.run([COMPILER, *options, *arguments], check=True, timeout=120)


@cache
def _half_instructions() -> tuple[str, ...]:
    """Let a CPU that can convert halves do so: they have the same bits as the library's."""
    flags = CPU_FLAGS.read_text() if CPU_FLAGS.exists() else ""
    return ("-mf16c",) if " f16c " in flags else ()


@cache
def build(source: str, name: str, defines: tuple[tuple[str, int], ...], more: str) -> ctypes.CDLL:
    """Compile one kernel as a library with an entry `run`; `more` is code after the source's."""
    text = re.sub(r"#include <.*>", "", cuda.read_source(source) + more)
    text = text.replace("extern __shared__", "extern").replace("__shared__", "static")
    macros = "".join(f"#define {key} {value}\n" for key, value in defines)
    entry = f'extern "C" void run(const int* g, int t, void** a) {{ launch({name}, g, t, a); }}\n'
    code = f'#include "{HEADER}"\n{macros}{text}\n{entry}'
    folder = build_folder()
    path = folder / f"{hashlib.sha256(code.encode()).hexdigest()[:16]}.cpp"
    path.write_text(code)
    library = path.with_suffix(".so")
    _compile("-shared", f"-I{folder}", f"-I{HERE}", str(path), "-o", str(library))
    return ctypes.CDLL(str(library))


def compile_on_cpu(
    source: str, name: str, defines: Mapping[str, int] | None = None, more: str = ""
) -> Callable[..., None]:
    """Stand in for `compile_kernel`, for tensors in host memory; `more` may hold the kernel."""
    library = build(source, name, tuple(sorted((defines or {}).items())), more)

    def call(
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        for argument in args:
            if isinstance(argument, torch.Tensor):
                assert argument.device.type == "cpu"
        arguments = Arguments()
        arguments.fill(args)
        library.run((ctypes.c_int * 3)(*(*grid, 1, 1)[:3]), block[0], arguments.places)
        if 0 not in grid:  # a block finds its shared memory full of NaNs
            shared = (ctypes.c_float * SHARED_FLOATS).in_dll(library, "shared")
            beyond = np.frombuffer(shared, dtype=np.float32)[-(-shared_bytes // 4) :]
            assert np.isnan(beyond).all(), f"{name} wrote beyond its {shared_bytes} bytes"

    return call
