"""Packages that only some tests need; what uses a missing one is skipped."""

import importlib
from typing import Any

import pytest


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        pytest.skip(f"needs the package {self._name}")


def optional(name: str) -> Any:
    """Return a package, or something that skips the test which first uses it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _Missing(name)
