"""A part of a file's tests for each of several processes: GPU_TESTS_PART=2/5 is the second of five.

Tests of one model stay together, since they share what the CPU says; others stay in their order, as
neighbours share kernels that have to be compiled.
"""

import os
from collections.abc import Sequence

import pytest

VARIABLE = "GPU_TESTS_PART"


def model_of(item: pytest.Item) -> str:
    """Return the model that a test is of; a test of none has its own name."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params["name"]) if callspec and "name" in callspec.params else item.nodeid


def divide(keys: Sequence[str], part: str) -> set[str]:
    """Return the keys of a part such as 2/5; each key is in one part."""
    number, parts = (int(word) for word in part.split("/"))
    assert 1 <= number <= parts
    unique = list(dict.fromkeys(keys))
    return set(unique[(number - 1) * len(unique) // parts : number * len(unique) // parts])


def keep_part(items: list[pytest.Item], part: str | None = None) -> list[pytest.Item]:
    """Leave the tests of this process's part in a list; return those that are not."""
    part = part or os.environ.get(VARIABLE, "1/1")
    keys = [model_of(item) for item in items]
    chosen = divide(keys, part)
    others = [item for item, key in zip(items, keys, strict=True) if key not in chosen]
    items[:] = [item for item, key in zip(items, keys, strict=True) if key in chosen]
    return others
