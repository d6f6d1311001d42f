"""The project's own files agree with each other and with the program."""

import json
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import headroom
from headroom.cli.main import make_app
from headroom.options import Options, flag, variable
from headroom.server.http_server import ABORT_S, STOP_S
from tests.server.fakes import FakeLLM, make_certificate, needs_openssl, serving

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
OPTIONS_PAGE = (ROOT / "docs/options.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
UNIT_FILE = ROOT / "packaging/headroom.service"
VARIABLES = {"HEADROOM_CONFIG", *(variable(setting) for setting in fields(Options))}
NATIVE_SOURCES = (".cpp", ".h", ".inl")  # what the C++ module is built from


def test_what_users_import_is_there() -> None:
    assert set(headroom.__all__) == {
        "LLM", "SamplingParams", "Options", "Plan", "HeadroomError", "__version__",
        "Completion", "AnswerDelta",
        "Conversation", "OutputFormat", "Thinking", "Tool", "ToolChoice",
    }  # fmt: skip
    for name in headroom.__all__:
        assert getattr(headroom, name) is not None
        assert name in dir(headroom)


def test_what_users_must_not_import_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'headroom' has no attribute 'Engine'"):
        _ = headroom.Engine


def test_the_command_is_the_programs_main() -> None:
    assert PROJECT["project"]["scripts"] == {"headroom": "headroom.cli.main:main"}


def test_extras_are_those_that_messages_name() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert extras == {"server", "gpu", "test", "mutation", "clients", "browser"}


def test_every_command_of_the_readme_exists() -> None:
    commands = {
        command.callback.__name__ for command in make_app().registered_commands if command.callback
    }
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    shell = "".join(text for language, text in blocks if not language)
    used = set(re.findall(r"^headroom (\w+)", shell, re.MULTILINE))
    assert {"pull", "run", "serve"} <= used
    assert used <= commands


def test_every_command_is_in_the_readme() -> None:
    names = [
        command.callback.__name__.replace("_", "-")
        for command in make_app().registered_commands
        if command.callback
    ]
    assert [name for name in names if f"headroom {name}" not in README] == []


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE))
    used = set(re.findall(r"`?make (\w+)", README))
    assert {"demo", "test", "serve", "lint"} <= used
    assert used <= targets


def test_the_options_page_lists_every_option() -> None:
    settings = [s for s in fields(Options) if s.metadata["group"] != "model"]
    assert [flag(s) for s in settings if f"`{flag(s)}`" not in OPTIONS_PAGE] == []


def test_the_options_page_names_no_flag_that_is_not_there() -> None:
    table = re.findall(r"^\| `(--[\w-]+)`", OPTIONS_PAGE, re.MULTILINE)
    assert table
    assert set(table) <= {flag(setting) for setting in fields(Options)}


def test_torch_is_installed_first_and_alone() -> None:
    installs = re.findall(r"pip install --quiet (.*)", MAKEFILE)
    assert installs[:2] == ['"$(TORCH)"', '--editable ".[server,test]"']
    assert installs[2:] == ['--editable ".[mutation]"']  # for `make mutants` alone


def test_ci_runs_the_readmes_test_command_in_a_fresh_environment() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert 'make test VENV="$work/venv"' in script.read_text()


def test_pictures_of_the_pages_are_small() -> None:
    pictures = list((ROOT / "docs").glob("*.png"))
    assert pictures
    assert [x.name for x in pictures if x.stat().st_size > 150_000] == []


def test_the_licence_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, with what a build or a test run leaves behind."""
    root = tmp_path_factory.mktemp("source") / "headroom"
    root.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "headroom", root / "headroom")
    (root / "tests").mkdir()
    (root / "tests/test_nothing.py").touch()
    for left in ("headroom/__pycache__/x.pyc", "build/t/headroom/kernels/x.o", "headroom/x.so"):
        (root / left).parent.mkdir(parents=True, exist_ok=True)
        (root / left).touch()
    return root


def build(source: Path, kind: str, settings: dict[str, str]) -> Path:
    """Build a wheel or an sdist without isolation, and return its path."""
    out = source.parent / "dist"
    code = (
        "import scikit_build_core.build as b, os; os.makedirs('../dist', exist_ok=True);"
        f" open('../name', 'w').write(b.build_{kind}('../dist', {settings!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / (source.parent / "name").read_text()


def package_files() -> set[str]:
    """Return the files of the package that people wrote, C++ sources included."""
    found = (path for path in (ROOT / "headroom").rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.suffix not in (".so", ".pyc") and not path.name.startswith(".")
    }


def test_the_wheel_has_every_file_that_runs_and_no_other(source: Path) -> None:
    with zipfile.ZipFile(build(source, "wheel", {"wheel.cmake": "false"})) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        scripts = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "headroom = headroom.cli.main:main" in wheel.read(scripts[0]).decode()
    assert found == {name for name in package_files() if not name.endswith(NATIVE_SOURCES)}
    for kind in ("server/page/index.html", "kernels/cuda/matmul.cu", "kernels/cuda/common.cuh"):
        assert f"headroom/{kind}" in found
    assert "headroom/py.typed" in found
    assert any(name.startswith("headroom/kernels/triton/device/") for name in found)


def test_the_sdist_has_the_sources_and_nothing_that_was_built(source: Path) -> None:
    with tarfile.open(build(source, "sdist", {})) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    assert package_files() <= found
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "tests/test_nothing.py"} <= found
    assert [name for name in found if name.endswith((".so", ".o", ".pyc"))] == []


@pytest.mark.slow
def test_a_wheel_made_from_the_sdist_has_the_cpp_module(source: Path, tmp_path: Path) -> None:
    """pip fetches what the build needs."""
    sdist = build(source, "sdist", {})
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path)]
    done = subprocess.run([*command, str(sdist)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        native = [name for name in wheel.namelist() if name.endswith(".so")]
    assert [Path(name).name.partition(".")[0] for name in native] == ["_native"]


def instructions() -> Iterator[tuple[str, str]]:
    """Yield the instructions of the Dockerfile: the word, and the rest of it on one line."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, " ".join(rest.split())


def image_environment() -> dict[str, str]:
    words = [shlex.split(rest) for word, rest in instructions() if word == "ENV"]
    return dict(part.split("=", 1) for each in words for part in each)


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = COMPOSE["services"][name]
    return found


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT_FILE)
    return parser


def stop_seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_images_are_built_from_files_that_docker_sees() -> None:
    seen = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied: set[str] = set()
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            copied |= set(rest.split()[:-1])
    assert copied == seen
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_both_images_serve_as_a_user_without_rights() -> None:
    stages = DOCKERFILE.split("\nFROM ")[1:]
    targets = {stage.split("\n")[0].rpartition(" AS ")[2]: stage for stage in stages}
    assert [*targets] == ["wheel", "base", "cuda", "cpu"]
    assert targets["cpu"].rstrip().endswith("USER 10001")
    assert targets["cuda"].rstrip().endswith("USER 10001")
    told = dict(instructions())
    assert (told["ENTRYPOINT"], told["CMD"]) == ('["headroom"]', '["serve"]')
    assert (told["STOPSIGNAL"], told["EXPOSE"]) == ("SIGTERM", "8080")
    assert "/health" in told["HEALTHCHECK"]
    assert told["VOLUME"] == image_environment()["HEADROOM_HOME"]


@needs_openssl
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_the_health_check_of_the_images_asks_a_server_with_and_without_tls(
    tls: bool, tmp_path: Path
) -> None:
    program, *arguments = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    assert program == "python"
    cert, key = make_certificate(tmp_path, "own") if tls else (None, None)
    with serving(FakeLLM(), Options(port=0, tls_cert=cert, tls_key=key)) as server:
        environment = {"HEADROOM_PORT": server.address.rpartition(":")[2]}
        if cert is not None:
            environment["HEADROOM_TLS_CERT"] = cert
        done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
    assert done.returncode == 1


def test_images_install_the_torch_of_the_makefile_and_extras_that_exist() -> None:
    torch = re.findall(r"^TORCH \?= (.*)$", MAKEFILE, re.MULTILINE)
    assert re.findall(r"^ARG TORCH=(.*)$", DOCKERFILE, re.MULTILINE) == torch * 2
    extras = set(",".join(re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)).split(","))
    assert extras == {"server", "gpu"} <= set(PROJECT["project"]["optional-dependencies"])


def test_images_compose_and_unit_set_variables_that_exist() -> None:
    used = set(image_environment())
    for name in COMPOSE["services"]:
        used |= set(service(name)["environment"])
    used |= set(re.findall(r"HEADROOM_\w+", UNIT_FILE.read_text()))
    used |= set(re.findall(r"HEADROOM_\w+", (ROOT / "packaging/headroom.env").read_text()))
    ours = {name for name in used if name.startswith("HEADROOM_")}
    assert {"HEADROOM_HOST", "HEADROOM_MODEL", "HEADROOM_ALLOW_HOST"} <= ours
    assert ours <= VARIABLES


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_compose_runs_each_image_under_its_profile(name: str) -> None:
    assert service(name)["profiles"] == [name]
    assert service(name)["build"]["target"] == name
    # Other services call it by this name, which the server has to know.
    assert service(name)["networks"]["default"]["aliases"] == ["headroom"]
    assert service(name)["environment"]["HEADROOM_ALLOW_HOST"].endswith(":-headroom}")
    assert service(name)["ports"] == ["127.0.0.1:${PORT:-8080}:8080"]
    # An error that comes back at each start does not restart it for ever.
    assert re.fullmatch(r"on-failure:[1-9]", service(name)["restart"])
    volume = f"headroom:{image_environment()['HEADROOM_HOME']}"
    assert volume in service(name)["volumes"]


def test_whatever_stops_the_server_waits_until_it_has_drained() -> None:
    drained = Options().drain + STOP_S + ABORT_S
    assert stop_seconds(unit()["Service"]["TimeoutStopSec"]) > drained
    assert stop_seconds(service("cpu")["stop_grace_period"]) > drained


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The program is replaced by one that is there, since systemd looks for it."""
    text = UNIT_FILE.read_text()
    assert "ExecStart=/opt/headroom/bin/headroom serve\n" in text
    copy = tmp_path / UNIT_FILE.name
    copy.write_text(text.replace("/opt/headroom/bin/headroom", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
