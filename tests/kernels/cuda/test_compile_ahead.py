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
from headroom.kernels.cuda import matmul
from headroom.kernels.cuda.code_cache import CodeCache, kept_bytes
from headroom.kernels.cuda.compile import Code, CudaKernel, compile_ahead, compile_kernel
from headroom.kernels.cuda.nvrtc import Nvrtc, open_nvrtc
from headroom.kernels.weight import Weight
from tests.nvrtc import missing
from tests.stand_in.driver import Driver
from tests.stand_in.gpu import stand_in_driver

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
SIZE = matmul.TiledSize(BY_NAME["q4_k"], 48, 512)
UNCACHED = {name: getattr(compiling, name).__wrapped__ for name in ("_find_kernel", "_load_source")}
UNNOTED = Nvrtc.compile
KERNELS = {"marker.cu": "headroom_part_step", "narrow.cu": "narrow_rows"}  # one of each source
NAMED: list[Code] = [("marker.cu", {"B": 1, "A": 2}), ("marker.cu", {}), ("narrow.cu", {})]


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
    monkeypatch.setattr(compiling, "_LOADED", set())
    monkeypatch.setattr(compiling, "_FOUND", {})
    for name, function in UNCACHED.items():
        monkeypatch.setattr(compiling, name, cache(function))


def test_a_launch_finds_the_code_that_was_compiled_ahead(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace
) -> None:
    compile_ahead(code for rows in (1, 4, 3) for code in SIZE.codes(rows, torch.device("cpu")))
    assert sorted(compiler.compiled) == ["activations.cu"] * 2 + ["matmul.cu"] * 2
    launched = []
    monkeypatch.setattr(
        compiling.CudaKernel, "__call__", lambda self, *call, **more: launched.append(self)
    )
    tiles = torch.zeros(1, dtype=torch.uint8)
    weight = Weight(tiles, SIZE.quant, SIZE.rows, SIZE.columns, matmul.TILES)
    for rows in (1, 4, 3):
        matmul.matmul(torch.zeros(rows, SIZE.columns), weight, "bf16")
    assert [kernel._name for kernel in launched[:2]] == [
        "activations.cu:norm_rows",
        "matmul.cu:product",
    ]
    assert all(compiler.code_of(kernel).startswith(b"\x7fELF") for kernel in launched)
    assert len(compiler.compiled) == 4  # nothing but what was compiled ahead


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
    compile_ahead([*NAMED, ("marker.cu", {"A": 2, "B": 1})])  # the same in another order
    assert len(compiler.compiled) == 3
    assert "kernels: 3 compiled ahead in " in caplog.text
    caplog.clear()
    for source, macros in NAMED:
        code = compiler.code_of(compile_kernel(source, KERNELS[source], macros))
        text = compiling.with_macros(source, dict(sorted(macros.items())))
        assert code == UNNOTED(open_nvrtc(), text, source, "sm_90")
    compile_ahead(NAMED)  # the GPU has them
    assert len(compiler.compiled) == 3
    assert caplog.records == []
    assert (kept_bytes(tmp_path) > 0) is kept
    restart(monkeypatch, tmp_path if kept else None)
    compile_ahead(NAMED)
    assert len(compiler.compiled) == (3 if kept else 6)


def test_code_that_no_folder_takes_is_held_only_until_it_is_asked_for(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    restart(monkeypatch, home)
    compile_ahead(NAMED)
    compile_ahead(NAMED)
    assert len(compiling.CODE._held) == len(compiler.compiled) == 3
    for source, macros in NAMED:
        compile_kernel(source, KERNELS[source], macros)
    assert compiling.CODE._held == {}
    assert len(compiler.compiled) == 3


def test_a_kernel_that_does_not_compile_ahead_raises_when_it_is_used(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compiler.wrong = "narrow.cu"
    compile_ahead(NAMED)
    assert compiler.compiled == ["marker.cu"] * 2
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "kernels: 2 compiled ahead" in caplog.text
    with pytest.raises(KernelError, match=r"^narrow\.cu does not compile for sm_90: "):
        compile_kernel("narrow.cu", "narrow_rows")
    compiler.wrong = "nothing"
    assert compiler.code_of(compile_kernel("narrow.cu", "narrow_rows"))


def test_without_a_compiler_or_a_source_nothing_is_said_ahead(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compile_ahead([("missing.cu", {})])

    def none() -> Nvrtc:
        raise KernelError("There is no libnvrtc.so, which compiles kernels.")

    monkeypatch.setattr(compiling, "open_nvrtc", none)
    compile_ahead(NAMED)
    assert caplog.records == []
    assert compiler.compiled == []
    with pytest.raises(KernelError, match="There is no libnvrtc"):
        compile_kernel("narrow.cu", "narrow_rows")
