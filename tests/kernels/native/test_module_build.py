"""The C++ module under sanitizers and on ARM, and the package installed without a compiler."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from headroom.kernels.native.module import MODULE

ROOT = Path(__file__).parents[3]
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
ARM_COMPILER, ARM_MACHINE = "aarch64-linux-gnu-g++", "qemu-aarch64"
PORTABLE = Path(__file__).with_name("exercise_portable.cpp")
EXERCISE = ROOT / "tests" / "kernels" / "exercise_native.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_the_kernels_pass_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), f"-DHEADROOM_SANITIZE={sanitizer}"]
    run(*configure, f"-DPython_EXECUTABLE={sys.executable}")
    run("cmake", "--build", str(tmp_path))
    runtime = run("gcc", f"-print-file-name={RUNTIMES[sanitizer]}").strip()
    # Python and numpy never free all memory; that is not tested here.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    variables = [f"{name}={value}" for name, value in {"LD_PRELOAD": runtime, **options}.items()]
    shown = run("env", *variables, sys.executable, str(EXERCISE), str(tmp_path))
    assert "exercised" in shown


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not all(map(shutil.which, ("g++", ARM_COMPILER, ARM_MACHINE))),
    reason=f"needs g++, {ARM_COMPILER} and {ARM_MACHINE}",
)
def test_the_portable_kernels_are_exact_on_arm_and_give_the_bits_of_x86(tmp_path: Path) -> None:
    kernels = ROOT / "headroom" / "kernels" / "native"
    sources = [PORTABLE, kernels / "kernels_portable.cpp", kernels / "panels.cpp"]
    flags = ["-O3", "-std=c++17", "-ffp-contract=off", "-static", f"-I{kernels}"]
    shown = []
    for compiler, machine in (("g++", []), (ARM_COMPILER, [ARM_MACHINE])):
        program = str(tmp_path / compiler)
        run(compiler, *flags, *map(str, sources), "-o", program)
        shown.append(run(*machine, program))
    assert shown[0] == shown[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_package_installs_without_a_compiler(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    target = str(tmp_path / "site")
    run("env", "CXX=/bin/false", python, "-m", "pip", "install", "--quiet", "--no-deps",
        "--target", target, str(ROOT))  # fmt: skip
    assert (tmp_path / "site" / "headroom" / "llm.py").is_file()
    assert not list((tmp_path / "site").rglob("_native*.so"))
    code = "from headroom.kernels.native.module import MISSING; print(MISSING)"
    shown = run("env", f"PYTHONPATH={target}", sys.executable, "-P", "-S", "-c", SITE + code)
    assert "there was no C++ compiler, or it failed (pip install -v shows why)" in shown


# With -S Python skips .pth files, and so does not find the editable install of this checkout.
SITE = f"import sys; sys.path += [{next(p for p in sys.path if p.endswith('site-packages'))!r}]; "


def run(*command: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
