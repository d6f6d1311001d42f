"""Access to Triton's kernels, which are imported on first use, and why they cannot run."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headroom.kernels.ops import Case

GPUS = ("cuda", "hip")  # kinds of devices that Triton compiles for
MISSING = "" if find_spec("triton") else "triton is not installed"


def triton_missing() -> str:
    """Return why Triton is missing; "" if it is installed."""
    return MISSING


def refuses(case: Case) -> str | None:
    """Return why Triton cannot run a case, whatever its types; None if it can."""
    if case.device not in GPUS:
        return f"runs on {' or '.join(GPUS)}, not {case.device}"
    if case.reference:
        return "only reference kernels were asked for"
    return MISSING or None


@cache
def find_kernel(module: str, name: str) -> Any:
    """Return a kernel of a module in `device`; importing it needs triton."""
    return getattr(import_module(f"headroom.kernels.triton.device.{module}"), name)


@cache
def language_type(name: str) -> Any:
    """Return Triton's type `float32`, `float16` or `bfloat16`."""
    return getattr(import_module("triton.language"), name)


def power_of_2(size: int, least: int = 1) -> int:
    """Return the smallest power of 2 that is at least `size` and `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def blocks(size: int, block: int) -> int:
    """Return how many blocks of `block` items hold `size` items."""
    return -(-size // block)
