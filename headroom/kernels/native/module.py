"""The C++ module, if it was built, and its one pool of threads."""

import importlib
import importlib.util
from typing import Any

import torch

from headroom.kernels.ops import Case

# What the activations of products with packed weights are rounded to, by the number that the C++
# module has for it (Products in ops.h). Products with plain weights are of floats.
PRODUCTS = {"f32": 0, "int24": 1, "int8": 2}

NAME = "headroom.kernels.native._native"


def load_module() -> tuple[Any, str]:
    """Return (the C++ module, ""), or (None, why it is missing)."""
    if importlib.util.find_spec(NAME) is None:
        return None, (
            "not built; when headroom was installed there was no C++ compiler, or it failed "
            "(pip install -v shows why)"
        )
    try:
        return importlib.import_module(NAME), ""
    except ImportError as error:
        return None, f"does not load: {error}"


MODULE, MISSING = load_module()


def refuses(case: Case) -> str | None:
    """Return why the C++ module cannot run a case, whatever its types; None if it can."""
    if MODULE is None:
        return MISSING
    if case.reference:
        return "only reference kernels were asked for"
    return None if case.device == "cpu" else f"runs on the CPU, not on {case.device}"


class Pool:
    """The threads that all C++ kernels of this process share."""

    def __init__(self) -> None:
        self._wanted = (torch.get_num_threads(), False, "")
        self._ops: Any = None

    def set(self, threads: int, *, pin: bool = False, isa: str = "") -> None:
        """Set the number of threads, whether they are pinned, and their instruction set.

        The empty name stands for the best one. The threads are restarted at the next use.
        """
        if self._wanted != (threads, pin, isa):
            self._wanted, self._ops = (threads, pin, isa), None

    @property
    def ops(self) -> Any:
        """The operations of the C++ module on this pool's threads."""
        if self._ops is None:
            self._ops = MODULE.Ops(*self._wanted)
        return self._ops


POOL = Pool()
