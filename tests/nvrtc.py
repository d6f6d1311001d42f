"""NVIDIA's run-time compiler, wherever a package has put it; no GPU is needed to compile."""

import ctypes
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from headroom.kernels.cuda.compile import read_source

TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"))


def _folders() -> Iterator[Path]:
    """Folders with `lib` and `include`: of the wheels, then of an installed toolkit."""
    for place in map(Path, sys.path):
        yield from sorted(place.glob("nvidia/*/"))
    yield from TOOLKITS


@cache
def find_library() -> Path | None:
    """Return where the compiler is; None where no package has it."""
    for folder in _folders():
        for lib in ("lib", "lib64"):
            if found := sorted(folder.glob(f"{lib}/libnvrtc.so.1*")):
                return found[0]
    return None


@cache
def find_headers() -> Path | None:
    """Return the folder of cuda_fp16.h; None where no package has it."""
    folders = (folder / "include" for folder in _folders())
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)


def missing() -> str:
    """Say what is missing for compiling; "" if nothing is."""
    if find_library() is None:
        return "needs NVRTC: pip install nvidia-cuda-nvrtc, or a CUDA toolkit"
    return "" if find_headers() else "needs cuda_fp16.h: pip install nvidia-cuda-runtime"


def compile_source(source: str, defines: Mapping[str, int], arch: int) -> str:
    """Compile a source for `sm_<arch>`; return the compiler's complaints, "" where it has none."""
    return _compile(source, defines, f"sm_{arch}")[1]


def compile_ptx(source: str, defines: Mapping[str, int], arch: int) -> bytes:
    """Compile a source to code that a GPU of `arch` and every later one runs."""
    ptx, complaints = _compile(source, defines, f"compute_{arch}")
    assert not complaints, complaints
    return ptx


def _compile(source: str, defines: Mapping[str, int], arch: str) -> tuple[bytes, str]:
    nvrtc, program = _load(), ctypes.c_void_p()
    macros = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    text = (macros + read_source(source)).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.encode(), 0, None, None)
    flags = (f"--gpu-architecture={arch}", "--std=c++17", f"-I{find_headers()}")
    options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), options) == 0:
            return _read(program, "PTX"), ""
        log = _read(program, "ProgramLog").decode(errors="replace")
        return b"", log or "it failed and says nothing"
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    """What the compiler has made: `PTX` or `ProgramLog`."""
    nvrtc, size = _load(), ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, room)
    return room.value


@cache
def _load() -> ctypes.CDLL:
    return ctypes.CDLL(str(find_library()))
