"""NVRTC, NVIDIA's run-time compiler: finds its library and headers; it needs no GPU."""

import ctypes
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from headroom.errors import KernelError

# Without NVIDIA's implicit conversions: kernels convert explicitly.
FLAGS = (
    "--std=c++17",
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
)
_HEADER = "cuda_fp16.h"
_TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"), Path("/usr"))


class Nvrtc:
    """The compiler: source text to machine code; several threads may compile at the same time."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def version(self) -> str:
        """The compiler's version, on which the machine code depends."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def compile(self, text: str, name: str, target: str) -> bytes:
        """Return a source's machine code for a target like `sm_90`, or raise the compiler's errors.

        For a target like `compute_90` it is PTX, which drivers translate for that and later GPUs.
        """
        headers = (f"-I{folder}" for folder in find_headers(self.version))
        flags = (f"--gpu-architecture={target}", *FLAGS, *headers)
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), name.encode(), 0, None, None
            )
        )
        try:
            if self._library.nvrtcCompileProgram(program, len(flags), options) != 0:
                said = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise KernelError(f"{name} does not compile for {target}: {said.strip()}")
            return self._read(program, "CUBIN" if target.startswith("sm") else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, found))
        return found.raw

    def _check(self, status: int) -> None:
        if status != 0:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            reason = self._library.nvrtcGetErrorString(status).decode()
            raise KernelError(f"NVRTC fails: {reason}.")


@cache
def open_nvrtc() -> Nvrtc:
    """Return the compiler of torch's CUDA version; of any version if torch is built for CPUs."""
    wanted = (torch.version.cuda or "").partition(".")[0]
    if wanted:
        try:
            # The bare name finds the library that torch has loaded already, or the system's.
            return Nvrtc(ctypes.CDLL(f"libnvrtc.so.{wanted}"))
        except OSError:
            pass  # it may be in a folder that the loader does not search
    for folder in _folders():
        for lib in ("lib", "lib64"):
            if found := sorted(folder.glob(f"{lib}/libnvrtc.so.{wanted or '1'}*")):
                return Nvrtc(ctypes.CDLL(str(found[0])))
    raise KernelError(
        f"There is no libnvrtc.so{f'.{wanted}' if wanted else ''}, which compiles kernels.",
        hint="pip install nvidia-cuda-nvrtc, or a CUDA toolkit, in the version torch is built for.",
    )


@cache
def find_headers(version: str) -> tuple[Path, ...]:
    """Return the folders of NVIDIA's headers, those of the compiler's version first.

    Several are returned, since one wheel may lack headers that another has. Headers of another
    major version are returned only if there are no others: headers rely on definitions of their own
    compiler.
    """
    folders = dict.fromkeys(folder / "include" for folder in _folders())
    found = {folder: _version(folder) for folder in folders if (folder / _HEADER).is_file()}
    if not found:
        raise KernelError(
            f"There is no {_HEADER}, which kernels include.",
            hint="pip install nvidia-cuda-runtime, or a CUDA toolkit.",
        )
    major = version.partition(".")[0]
    alike = [folder for folder in found if found[folder].partition(".")[0] == major]
    return tuple(sorted(alike or found, key=lambda folder: found[folder] != version))


def _version(headers: Path) -> str:
    """Return the CUDA version of a folder of headers; "" if unknown."""
    try:
        said = re.search(r"#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text("latin-1"))
    except OSError:
        return ""
    return f"{int(said[1]) // 1000}.{int(said[1]) % 1000 // 10}" if said else ""


def _folders() -> Iterator[Path]:
    """Yield folders that may have `lib` and `include`: of wheels, this environment, a toolkit."""
    for place in map(Path, sys.path):
        yield from sorted(place.glob("nvidia/*/"))
    yield Path(sys.prefix)
    yield from sorted(Path(sys.prefix).glob("targets/*/"))
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parents[1]
    yield from _TOOLKITS
    try:  # last, since it is slow to import: it finds CUDA_HOME
        from torch.utils.cpp_extension import CUDA_HOME
    except ImportError:
        return
    if CUDA_HOME:
        yield Path(CUDA_HOME)
