"""The project's own files agree with each other and with the program."""

import re
import stat
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import headroom
from headroom.cli.main import make_app
from headroom.options import Options, flag

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
OPTIONS_PAGE = (ROOT / "docs/options.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_what_users_import_is_there() -> None:
    assert set(headroom.__all__) == {
        "LLM", "SamplingParams", "Options", "Plan", "HeadroomError", "__version__"
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
    assert extras == {"server", "gpu", "test", "mutation", "clients"}


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
        command.callback.__name__ for command in make_app().registered_commands if command.callback
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


def test_the_licence_is_apache_2() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
