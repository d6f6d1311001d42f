"""NVIDIA's run-time compiler on whole sources; no GPU is needed to compile."""

from collections.abc import Mapping

from headroom.errors import KernelError
from headroom.kernels.cuda.compile import with_macros
from headroom.kernels.cuda.nvrtc import find_headers, open_nvrtc


def missing() -> str:
    """Say what is missing for compiling; "" if nothing is."""
    try:
        find_headers(open_nvrtc().version)
    except KernelError as error:
        return str(error)
    return ""


def compile_source(source: str, defines: Mapping[str, int], arch: int) -> str:
    """Compile a source for `sm_<arch>`; return the compiler's complaints, "" where it has none."""
    try:
        open_nvrtc().compile(with_macros(source, defines), source, f"sm_{arch}")
    except KernelError as error:
        return str(error)
    return ""
