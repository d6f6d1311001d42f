"""The modules that launch CUDA kernels, and other kernels in the place of theirs."""

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from headroom.kernels import cuda


@cache
def launchers() -> tuple[ModuleType, ...]:
    """Every module that asks for kernels, so that no list forgets one."""
    own = [module.name for module in pkgutil.iter_modules(cuda.__path__, f"{cuda.__name__}.")]
    found = (import_module(name) for name in own if name != f"{cuda.__name__}.compile")
    return tuple(module for module in found if hasattr(module, "compile_kernel"))


def replace_kernels(monkeypatch: pytest.MonkeyPatch, compile_kernel: Callable[..., Any]) -> None:
    """Let all launchers get their kernels from another function."""
    for module in launchers():
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
