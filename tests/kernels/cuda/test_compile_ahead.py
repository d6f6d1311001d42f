"""Kernels compiled ahead, in threads: found when they are asked for, and never in the way."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headroom.errors import KernelError
from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda import compile as compiling
from headroom.kernels.cuda import matmul, scratch
from headroom.kernels.cuda.buffers import Buffer
from headroom.kernels.cuda.code_cache import CodeCache, kept_bytes
from headroom.kernels.cuda.compile import (
    CudaKernel,
    WantedKernel,
    compile_ahead,
    compile_kernel,
    rehearsal,
)
from headroom.kernels.cuda.nvrtc import Nvrtc, open_nvrtc
from headroom.kernels.weight import Weight
from tests.nvrtc import missing
from tests.stand_in.driver import Driver
from tests.stand_in.gpu import stand_in_driver

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
QUANT, ROWS, COLUMNS = BY_NAME["q4_k"], 48, 512
UNCACHED = {name: getattr(compiling, name).__wrapped__ for name in ("_find_kernel", "_load_source")}
UNNOTED = Nvrtc.compile
KERNELS = {"marker.cu": "headroom_part_step", "narrow.cu": "narrow_rows"}  # one of each source
NAMED = [("marker.cu", {"B": 1, "A": 2}), ("marker.cu", {}), ("narrow.cu", {})]
WANTED = [
    WantedKernel(source, KERNELS[source], tuple(sorted(macros.items()))) for source, macros in NAMED
]


@dataclass
class Compiler:
    """NVRTC, which notes what it compiles, and the driver of the stand-in GPU."""

    driver: Driver
    compiled: list[str] = field(default_factory=list)  # names of sources
    wrong: str = "nothing"  # a source that does not compile

    def code_of(self, kernel: CudaKernel) -> bytes:
        """Return the machine code that a kernel was found in."""
        return self.driver.code_of(kernel._function)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """A new process with a GPU, and no folder to keep code in."""
    compile_source = Nvrtc.compile
    with stand_in_driver(monkeypatch) as driver:
        made = Compiler(driver)

        def compile_and_note(nvrtc: Nvrtc, text: str, name: str, target: str) -> bytes:
            text = text.replace("void", "wrong") if name == made.wrong else text
            code = compile_source(nvrtc, text, name, target)
            made.compiled.append(name)
            return code

        monkeypatch.setattr(Nvrtc, "compile", compile_and_note)
        monkeypatch.setattr(compiling, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        restart(monkeypatch)
        yield made


def restart(monkeypatch: pytest.MonkeyPatch, home: Path | None = None) -> None:
    """Forget what a process knows."""
    kept = CodeCache()
    if home is not None:
        kept.open(home)
    monkeypatch.setattr(compiling, "CODE", kept)
    monkeypatch.setattr(compiling, "_FOUND", {})
    for name, function in UNCACHED.items():
        monkeypatch.setattr(compiling, name, cache(function))


def multiply(rows: int) -> None:
    tiles = torch.zeros(1, dtype=torch.uint8)
    weight = Weight(tiles, QUANT, ROWS, COLUMNS, matmul.TILES)
    matmul.matmul(torch.zeros(rows, COLUMNS), weight, "bf16")


def test_a_launch_finds_the_code_that_was_compiled_ahead(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace
) -> None:
    with rehearsal() as wanted:
        for rows in (1, 4, 3):
            multiply(rows)
    assert compiler.compiled == []
    told: list[tuple[int, int]] = []
    compile_ahead(wanted, lambda done, total: told.append((done, total)))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert sorted(compiler.compiled) == ["activations.cu"] * 2 + ["matmul.cu"] * 2
    launched = []
    monkeypatch.setattr(
        compiling.CudaKernel, "__call__", lambda self, *call, **more: launched.append(self)
    )
    for rows in (1, 4, 3):
        multiply(rows)
    assert [kernel._name for kernel in launched[:2]] == [
        "activations.cu:norm_rows",
        "matmul.cu:product",
    ]
    assert all(compiler.code_of(kernel).startswith(b"\x7fELF") for kernel in launched)
    assert len(compiler.compiled) == 4  # nothing but what was compiled ahead


def test_a_rehearsal_launches_nothing_and_fills_integers_with_zeros(
    compiler: Compiler, gpu: SimpleNamespace
) -> None:
    cpu = torch.device("cpu")
    arena = scratch.Arena(torch.full((4096,), 0xA5, dtype=torch.uint8))
    with scratch.opened(arena):
        with rehearsal() as wanted, scratch.frame():
            compile_kernel("narrow.cu", "narrow_rows")((1,), (32,), ())
            ids = scratch.take(Buffer((8,), "i32"), cpu)
            values = scratch.take(Buffer((8,), "u8"), cpu)
            assert not ids.any()
            assert values.unique().tolist() == [0xA5]
            assert not scratch.empty_integers((1000,), "i64", cpu).any()
        with scratch.frame():
            ids.fill_(7)
            assert scratch.take(Buffer((8,), "i32"), cpu).tolist() == [7] * 8
    assert wanted == {WantedKernel("narrow.cu", "narrow_rows", ())}
    assert compiler.driver.launches == []
    assert isinstance(compile_kernel("narrow.cu", "narrow_rows"), CudaKernel)
    assert compiler.compiled == ["narrow.cu"]


def test_the_slowest_sources_and_the_products_of_most_rows_begin_first() -> None:
    few, many = (("matmul.cu", (("GROUPS", groups),)) for groups in (1, 4))
    slow, quick = ("delta_chunks.cu", ()), ("activations.cu", ())
    codes = [quick, few, many, slow]
    assert sorted(codes, key=compiling._begins) == [slow, many, few, quick]


@pytest.mark.parametrize("kept", [True, False])
def test_kernels_compiled_ahead_are_compiled_once_and_logged(
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kept: bool,
) -> None:
    caplog.set_level(logging.INFO)
    restart(monkeypatch, tmp_path if kept else None)
    compile_ahead([*WANTED, WANTED[0]])
    assert len(compiler.compiled) == 3
    assert "kernels: 3 sources ready in " in caplog.text
    for source, macros in NAMED:
        code = compiler.code_of(compile_kernel(source, KERNELS[source], macros))
        text = compiling.with_macros(source, dict(sorted(macros.items())))
        assert code == UNNOTED(open_nvrtc(), text, source, "sm_90")
    compile_ahead(WANTED)  # the GPU has them
    assert len(compiler.compiled) == 3
    assert (kept_bytes(tmp_path) > 0) is kept
    restart(monkeypatch, tmp_path if kept else None)
    compile_ahead(WANTED)
    assert len(compiler.compiled) == (3 if kept else 6)


def test_code_that_no_folder_takes_is_compiled_once_in_a_process(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    restart(monkeypatch, home)
    compile_ahead(WANTED)
    compile_ahead(WANTED)
    for source, macros in NAMED:
        compile_kernel(source, KERNELS[source], macros)
    assert len(compiler.compiled) == 3


def test_a_kernel_that_does_not_compile_ahead_raises_when_it_is_used(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compiler.wrong = "narrow.cu"
    compile_ahead(WANTED)
    assert compiler.compiled == ["marker.cu"] * 2
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "kernels: 2 sources ready" in caplog.text
    with pytest.raises(KernelError, match=r"^narrow\.cu does not compile for sm_90: "):
        compile_kernel("narrow.cu", "narrow_rows")
    compiler.wrong = "nothing"
    assert compiler.code_of(compile_kernel("narrow.cu", "narrow_rows"))


def test_without_a_compiler_or_a_source_nothing_is_said_ahead(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    compile_ahead([WantedKernel("missing.cu", "nothing", ())])

    def none() -> Nvrtc:
        raise KernelError("There is no libnvrtc.so, which compiles kernels.")

    monkeypatch.setattr(compiling, "open_nvrtc", none)
    compile_ahead(WANTED)
    assert caplog.records == []
    assert compiler.compiled == []
    with pytest.raises(KernelError, match="There is no libnvrtc"):
        compile_kernel("narrow.cu", "narrow_rows")
