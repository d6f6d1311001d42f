"""Finds Triton's kernels, and says why they cannot run where they cannot."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headroom.kernels.ops import Case

GPUS = ("cuda", "hip")  # torch calls AMD's GPUs cuda too
MISSING = "" if find_spec("triton") else "triton is not installed"


def triton_missing() -> str:
    """Say why there is no Triton here; "" where there is."""
    return MISSING


def refuses(case: Case) -> str | None:
    """Say why no kernel of this backend runs a case."""
    if case.device not in GPUS:
        return f"runs on {' or '.join(GPUS)}, not {case.device}"
    if case.reference:
        return "plain kernels were asked for"
    return MISSING or None


@cache
def find_kernel(module: str, name: str) -> Any:
    """Return a kernel of a file in `device`; those need triton, which may be missing."""
    return getattr(import_module(f"headroom.kernels.triton.device.{module}"), name)


@cache
def language_type(name: str) -> Any:
    """Return what Triton calls a type: `float32`, `float16` or `bfloat16`."""
    return getattr(import_module("triton.language"), name)


def power_of_2(size: int, least: int = 1) -> int:
    """Return the smallest power of 2 that is not below `size` and `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def blocks(size: int, block: int) -> int:
    """Return how many blocks hold so many."""
    return -(-size // block)
