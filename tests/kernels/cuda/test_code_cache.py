"""Compiled kernels kept on disk: found again, made anew where they must be, never in the way."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from headroom.errors import KernelError
from headroom.kernels.cuda import code_cache
from headroom.kernels.cuda import compile as compiling
from headroom.kernels.cuda.code_cache import CodeCache, code_folder, code_key, kept_bytes
from headroom.kernels.cuda.nvrtc import FLAGS, Nvrtc, open_nvrtc
from tests.nvrtc import missing
from tests.stand_in.driver import Driver
from tests.stand_in.gpu import stand_in_driver

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
KERNEL = 'extern "C" __global__ void kernel() {}\n'
OTHER, THIRD = KERNEL.replace("kernel", "other"), KERNEL.replace("kernel", "third")


@dataclass
class Gpu:
    """The compiler, which notes what it compiles, and the driver of the stand-in GPU."""

    driver: Driver
    compiled: list[tuple[str, str]] = field(default_factory=list)  # source texts and targets


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    compile_source = Nvrtc.compile
    with stand_in_driver(monkeypatch) as driver:
        made = Gpu(driver)

        def compile_and_note(nvrtc: Nvrtc, text: str, name: str, target: str) -> bytes:
            code = compile_source(nvrtc, text, name, target)
            made.compiled.append((text, target))
            return code

        monkeypatch.setattr(Nvrtc, "compile", compile_and_note)
        yield made


def start(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Begin with an empty memory, as a new process does."""
    cache = CodeCache()
    cache.open(home)
    monkeypatch.setattr(compiling, "CODE", cache)


def load(text: str = KERNEL, sm: int = 90) -> None:
    compiling.load_code("some.cu", text, sm, 0)


def files(home: Path) -> list[Path]:
    return sorted(code_folder(home).iterdir())


def test_a_second_process_finds_what_the_first_compiled(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(3):
        start(monkeypatch, tmp_path)
        load()
    assert gpu.compiled == [(KERNEL, "sm_90")]
    assert gpu.driver.modules == [open_nvrtc().compile(KERNEL, "some.cu", "sm_90")] * 3
    assert [path.suffix for path in files(tmp_path)] == [".cubin"]
    assert kept_bytes(tmp_path) == files(tmp_path)[0].stat().st_size > 0


def test_another_source_gpu_version_or_flag_is_compiled_for_itself(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path)
    load()
    load(OTHER)
    load(sm=86)
    monkeypatch.setattr(compiling, "FLAGS", FLAGS[1:])
    load()
    major, _, minor = open_nvrtc().version.partition(".")
    monkeypatch.setattr(Nvrtc, "version", f"{major}.{minor}1")
    load()
    assert gpu.compiled == [
        *((KERNEL, "sm_90"), (OTHER, "sm_90"), (KERNEL, "sm_86")),
        *((KERNEL, "sm_90"), (KERNEL, "sm_90")),
    ]
    assert len(files(tmp_path)) == 5
    first, other, older, *again = gpu.driver.modules
    assert again == [first, first]
    assert len({first, other, older}) == 3


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    keys = {code_key("ab", "c"), code_key("a", "bc"), code_key("abc"), code_key("abc", "")}
    assert len(keys) == 4


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 32, b"\0" * 99], ids=len)
def test_damaged_code_is_compiled_anew_and_replaced(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: bytes,
) -> None:
    start(monkeypatch, tmp_path)
    load()
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage)
    load()
    assert len(gpu.compiled) == 2
    assert gpu.driver.modules == [whole[32:]] * 2  # behind its checksum
    assert path.read_bytes() == whole
    assert f"{path.name} is damaged" in caplog.text


def test_code_that_the_driver_does_not_take_is_compiled_anew(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path)
    load()
    gpu.driver.load_statuses = [209]  # no kernel image is available
    load()
    assert len(gpu.compiled) == len(gpu.driver.modules) == 2


def test_code_that_a_full_gpu_has_no_room_for_is_not_compiled_anew(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path)
    load()
    gpu.driver.load_statuses = [2]
    with pytest.raises(KernelError, match=r"^Kernels could not be loaded: out of memory\.$"):
        load()
    assert len(gpu.compiled) == len(gpu.driver.modules) == 1


def test_a_source_that_does_not_compile_is_an_error_and_leaves_nothing(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(monkeypatch, tmp_path)
    with pytest.raises(KernelError, match=r'^some\.cu does not compile for sm_90: .*"wrong"'):
        load(KERNEL.replace("void", "wrong"))
    assert not gpu.driver.modules
    assert not code_folder(tmp_path).exists()


def test_a_home_that_is_no_folder_is_said_once_and_no_error(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    start(monkeypatch, home)
    load()
    load(OTHER)
    assert gpu.compiled == [(KERNEL, "sm_90"), (OTHER, "sm_90")]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert kept_bytes(home) == 0


def test_a_folder_that_may_only_be_read_is_read(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    start(monkeypatch, tmp_path)
    load()
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(code_cache, "write_all", refuse)
    start(monkeypatch, tmp_path)
    load()
    assert gpu.compiled == [(KERNEL, "sm_90")]
    assert caplog.records == []
    load(OTHER)
    load(THIRD)
    assert [text for text, _ in gpu.compiled] == [KERNEL, OTHER, THIRD]
    (record,) = caplog.records
    folder = code_folder(tmp_path)
    told = f"kernels: code in {folder} is of no use: [Errno 13] Permission denied"
    assert record.getMessage() == told
    assert len(files(tmp_path)) == 1


def test_a_full_folder_loses_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = CodeCache(max_bytes=3 * (32 + 100))
    cache.open(tmp_path)
    for number in range(3):
        cache.save(str(number), b"x" * 100)
        os.utime(code_folder(tmp_path) / f"{number}.cubin", (1000 + number, 1000 + number))
    assert cache.load("0") == b"x" * 100  # used now, and so the newest
    cache.save("3", b"y" * 100)
    assert [cache.load(str(number)) is None for number in range(4)] == [False, True, False, False]
    assert kept_bytes(tmp_path) == 3 * (32 + 100)


def test_writers_at_the_same_time_leave_whole_code_and_nothing_else(tmp_path: Path) -> None:
    cache = CodeCache()
    cache.open(tmp_path)

    def work(number: int) -> bytes | None:
        cache.save("same", b"z" * 10_000)
        return cache.load("same")

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(work, range(64)))
    assert found == {b"z" * 10_000}
    assert [path.name for path in files(tmp_path)] == ["same.cubin"]


def test_without_a_home_nothing_is_kept(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiling, "CODE", CodeCache())
    load()
    load()
    assert len(gpu.compiled) == 2
    assert list(tmp_path.iterdir()) == []
