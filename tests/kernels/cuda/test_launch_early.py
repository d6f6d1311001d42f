"""Kernels that start before the last one has ended."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom.kernels.cuda.compile import SOURCES, read_source

WAITS = ("wait_for_last();", "begin_after_last();")


def compiled(call: ast.expr, around: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """The sources and names of the kernels that an expression in a function may stand for."""
    calls = [call]
    if isinstance(call, ast.Name):
        calls = [
            found.value
            for found in ast.walk(around)
            if isinstance(found, ast.Assign)
            and isinstance(found.targets[0], ast.Name)
            and found.targets[0].id == call.id
        ]
    assert calls
    for one in calls:
        assert isinstance(one, ast.Call)
        source, name = (ast.literal_eval(word) for word in one.args[:2])
        yield source, name


def is_early(keyword: ast.keyword) -> bool:
    return keyword.arg == "early" and ast.literal_eval(keyword.value) is True


def early_launches(path: Path) -> Iterator[tuple[str, str]]:
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and any(map(is_early, call.keywords)):
                yield from compiled(call.func, function)


EARLY = sorted({launch for path in SOURCES.glob("*.py") for launch in early_launches(path)})


def test_the_launches_that_may_be_early_are_found() -> None:
    known = {("matmul.cu", "product"), ("decode.cu", "decode"), ("sorted.cu", "gate_up")}
    assert known < {*EARLY}


def test_a_step_begins_with_a_kernel_that_waits_for_all_before() -> None:
    assert not {("small.cu", "embed"), ("dequant.cu", "embed_tiles")} & {*EARLY}


@pytest.mark.parametrize(("source", "name"), EARLY, ids=str)
def test_a_kernel_that_starts_early_waits_and_no_thread_leaves_before(
    source: str, name: str
) -> None:
    kernels = read_source(source).split('extern "C" __global__')
    (body,) = (kernel for kernel in kernels[1:] if re.search(rf"\b{name}\(", kernel.split("{")[0]))
    before = min(body.find(wait) for wait in WAITS if wait in body)
    assert "return" not in body[:before]
