"""NVRTC, the run-time compiler: where it is found, its machine code, its errors."""

from pathlib import Path

import pytest
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import nvrtc
from tests.nvrtc import missing

needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that are searched for headers; a test fills them."""
    folders: list[Path] = []
    monkeypatch.setattr(nvrtc, "_folders", lambda: iter(folders))
    monkeypatch.setattr(nvrtc, "open_nvrtc", nvrtc.open_nvrtc.__wrapped__)
    monkeypatch.setattr(nvrtc, "find_headers", nvrtc.find_headers.__wrapped__)
    return folders


def headers(folder: Path, version: int) -> Path:
    include = folder / "include"
    include.mkdir(parents=True)
    (include / "cuda_fp16.h").touch()
    (include / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    return include


@needs_nvrtc
def test_a_kernel_becomes_machine_code_that_is_the_same_every_time() -> None:
    text = (
        '#include <cuda_fp16.h>\nextern "C" __global__ void one(half* x) { *x = __int2half_rn(1); }'
    )
    compiler = nvrtc.open_nvrtc()
    code = compiler.compile(text, "one.cu", "sm_90")
    assert code[:4] == b"\x7fELF"
    assert b"one" in code
    assert compiler.compile(text, "one.cu", "sm_90") == code
    assert compiler.compile(text, "one.cu", "sm_80") != code


@needs_nvrtc
def test_an_error_in_a_source_is_reported_with_its_line() -> None:
    with pytest.raises(
        KernelError, match=r"bad\.cu does not compile for sm_90: bad\.cu\(2\): error"
    ):
        nvrtc.open_nvrtc().compile("\nint x = y;", "bad.cu", "sm_90")
    with pytest.raises(KernelError, match=r"sm_12"):
        nvrtc.open_nvrtc().compile("", "old.cu", "sm_12")


def test_a_machine_without_the_compiler_says_what_to_install(
    nowhere: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(
        KernelError, match=r"There is no libnvrtc\.so\.99, which compiles kernels\."
    ):
        nvrtc.open_nvrtc()


def test_headers_of_the_compilers_version_come_before_others(
    nowhere: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(KernelError, match=r"There is no cuda_fp16\.h"):
        nvrtc.find_headers("13.0")
    versions = {"12.8": 12080, "13.0": 13000, "13.1": 13010}
    at = {name: headers(tmp_path / name, number) for name, number in versions.items()}
    (tmp_path / "empty").mkdir()
    nowhere += [tmp_path / name for name in ("empty", *versions, "13.1")]
    assert nvrtc.find_headers("12.4") == (at["12.8"],)
    assert nvrtc.find_headers("13.0") == (at["13.0"], at["13.1"])
    assert nvrtc.find_headers("13.1") == (at["13.1"], at["13.0"])
    assert nvrtc.find_headers("14.0") == tuple(at.values())  # better than none
