"""Python clients, unmodified, against a running server: each case of each program."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Running
from tests.clients.found import clients_python, need_packages
from tests.clients.programs import cases

PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {
    "openai_chat": ("openai",),
    "openai_responses": ("openai",),
    "anthropic_messages": ("anthropic",),
    "litellm_all": ("litellm",),
    "langchain_chat": ("langchain-openai",),
    "instructor_models": ("instructor", "openai", "anthropic"),
    "ollama_client": ("ollama",),
}
CASES = [
    (program, case)
    for program in NEEDS
    for case in re.findall(r"^def case_(\w+)", (PROGRAMS / f"{program}.py").read_text(), re.M)
]
pytestmark = pytest.mark.clients


@cache
def report_of(program: str, address: str, key: str) -> dict[str, str]:
    """Run all cases of a program and return what went wrong in each."""
    done = subprocess.run(
        [clients_python(), PROGRAMS / f"{program}.py", address, MODEL, key],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": os.environ["PATH"], "NO_PROXY": "*", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize(("program", "case"), CASES)
def test_a_client_gets_what_it_expects(program: str, case: str, running: Running) -> None:
    need_packages(*NEEDS[program])
    problem = report_of(program, running.address, running.key)[case]
    assert not problem, problem


def test_formats_and_forced_calls_limit_the_tokens(running: Running) -> None:
    """The scripted engine takes only tokens that the constraint allows, if there is one."""
    need_packages("openai", "anthropic", "instructor")
    report_of("instructor_models", running.address, running.key)
    asked = list(zip(running.engine.requests, running.engine.prompts, strict=True))
    for question in (cases.ASK_JSON, cases.ASK_CALL):
        limits = [request.constraint for request, prompt in asked if question in prompt]
        assert limits
        assert None not in limits
