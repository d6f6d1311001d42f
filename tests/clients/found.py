"""Finds the clients: on the PATH, or where an environment variable says."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

# The environment variables: for the Python with the clients' packages, and for each program.
PYTHON = "CLIENTS_PYTHON"
PROGRAMS = {
    "codex": "CLIENT_CODEX",
    "claude": "CLIENT_CLAUDE",
    "opencode": "CLIENT_OPENCODE",
    "cn": "CLIENT_CONTINUE",
    "qwen": "CLIENT_QWEN_CODE",
    "open-webui": "CLIENT_OPEN_WEBUI",
}


def clients_python() -> str:
    """Return the Python that runs the programs of Python clients; this one if none is named."""
    return os.environ.get(PYTHON) or sys.executable


def find_program(name: str) -> str:
    """Return where a client's program is; skip the test if there is none."""
    path = os.environ.get(PROGRAMS[name]) or shutil.which(name)
    if path is None or shutil.which(path) is None:
        pytest.skip(f"{name} is missing: put it on the PATH, or name it by {PROGRAMS[name]}")
    return path


def need_packages(*names: str) -> None:
    """Skip the test if the clients' Python lacks one of these packages."""
    missing = [name for name in names if name not in _packages()]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing in {clients_python()}: see {PYTHON}")


@cache
def _packages() -> frozenset[str]:
    """Return the names of all packages that the clients' Python has."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps([d.metadata['Name'].lower() for d in m.distributions()]))"
    )
    done = subprocess.run(
        [clients_python(), "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return frozenset(json.loads(done.stdout))
