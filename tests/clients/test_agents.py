"""Coding agents, unmodified, against a running server: each reads a file and uses what it says."""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headroom.options import Options
from tests.clients.answers import RESULT
from tests.clients.conftest import MODEL, Running
from tests.clients.documented import documented
from tests.clients.found import find_program
from tests.clients.model import CONTEXT, MANNERS
from tests.clients.scripted import ScriptedEngine
from tests.clients.terminal import Terminal
from tests.server.fakes import FakeLLM, serving

pytestmark = pytest.mark.clients
TASK = "Read note.txt, write its secret word into answer.txt, and tell me the word."
PREFIX = "the secret word is "
# Words in the prompts by which OpenCode and Claude Code ask for a session's title, and the answers.
TITLES = {"title generator": "A note", "sentence-case title": '{"title": "A note"}'}


class Session(NamedTuple):
    """A folder for an agent to work in, and what its note says."""

    folder: Path
    home: Path
    word: str

    def environment(self, **more: str) -> dict[str, str]:
        """Return variables that keep an agent in its own home and away from any network."""
        dead_end = (
            "http://127.0.0.1:9"  # nothing listens there: requests to other hosts fail at once
        )
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TERM": "dumb",
            "HTTP_PROXY": dead_end,
            "HTTPS_PROXY": dead_end,
            "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }

    def write(self, path: str, text: str) -> None:
        """Write a file into the agent's home."""
        file = self.home / path
        file.parent.mkdir(parents=True)
        file.write_text(text)

    def run(self, command: list[str], environment: dict[str, str]) -> str:
        """Run an agent in the folder and return what it prints."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def check(self, said: str, running: Running) -> None:
        """Check that the agent ran both calls, and that the model saw their results."""
        assert (self.folder / "answer.txt").read_text().strip() == self.word
        assert said.strip().endswith(f"The word is {self.word}.")
        assert running.engine.finished.keys() == {"stop"}
        assert PREFIX + self.word in running.engine.prompts[-1]
        self._check_history(running.engine)

    def _check_history(self, engine: ScriptedEngine) -> None:
        """Check that every prompt begins with the last prompt and its answer, token by token."""
        turns = list(zip(engine.requests, engine.answers, engine.prompts, strict=True))
        turns = [turn for turn in turns if not any(words in turn[2] for words in TITLES)]
        assert len(turns) == 3
        for (before, answer, _), (after, _, _) in pairwise(turns):
            said = before.prompt + answer
            assert after.prompt[: len(said)] == said


@pytest.fixture
def session(tmp_path: Path, running: Running) -> Iterator[Session]:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    word = secrets.token_hex(8)
    (folder / "note.txt").write_text(f"{PREFIX}{word}\n")
    before = running.engine.script
    yield Session(folder, home, word)
    running.engine.script = before
    running.engine.forget()


def follow(
    running: Running, read: tuple[str, Any], write: tuple[str, Any], *, odd: bool = True
) -> None:
    """Let the model read the note by one call, write the word by another, and then say it.

    The word stands in no argument here: `{word}` is filled with what the first call's result says.
    Calls with odd white space come back as they were only if the server remembers their text.
    """

    manner = running.manner

    def script(prompt: str) -> str:
        for words, title in TITLES.items():
            if words in prompt:
                return manner.thought(prompt, "A title.") + title
        results = RESULT.findall(prompt)
        if not results:
            said = f"I read it.\n{manner.call(*read, odd=odd)}"
            return manner.thought(prompt, "I must read it.") + said
        word = re.findall(f"{PREFIX}([0-9a-f]+)", results[0])[0]
        if len(results) == 1:
            name, arguments = write
            filled = {key: text.replace("{word}", word) for key, text in arguments.items()}
            return manner.thought(prompt, "I must write it.") + manner.call(name, filled, odd=odd)
        return manner.thought(prompt, "It is written.") + f"The word is {word}."

    running.engine.script = script


# Codex offers other tools to models whose names it knows: a patch as plain text, or a program that
# calls the other tools.
PATCH = "*** Begin Patch\n*** Add File: answer.txt\n+{word}\n*** End Patch\n"
CODEX_CALLS = {
    MODEL: (
        ("exec_command", {"cmd": "cat note.txt"}),
        ("exec_command", {"cmd": "echo {word} > answer.txt"}),
    ),
    "gpt-5.5": (("exec_command", {"cmd": "cat note.txt"}), ("apply_patch", {"input": PATCH})),
    "gpt-6-sol": (
        ("exec", {"input": 'text(await tools.exec_command({cmd: "cat note.txt"}))'}),
        ("exec", {"input": 'text(await tools.exec_command({cmd: "echo {word} > answer.txt"}))'}),
    ),
}


@pytest.mark.parametrize("model", CODEX_CALLS)
def test_codex_reads_and_writes_a_file(session: Session, running: Running, model: str) -> None:
    codex = find_program("codex")
    settings = documented("Codex", running, MODEL)
    if running.key != "none":
        provider = 'wire_api = "responses"\n'
        assert provider in settings
        settings = settings.replace(provider, f'{provider}env_key = "HEADROOM_KEY"\n')
    session.write(".codex/config.toml", settings)
    strict = model != MODEL  # one of the tools has a grammar: no call has odd white space then
    follow(running, *CODEX_CALLS[model], odd=not strict)
    # The sandbox needs rights that a container may lack; the script runs nothing dangerous.
    flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", model]
    printed = session.run(
        [codex, "exec", *flags, TASK], session.environment(HEADROOM_KEY=running.key)
    )
    items = [json.loads(line).get("item", {}) for line in printed.splitlines() if line[:1] == "{"]
    said = [item["text"] for item in items if item.get("type") == "agent_message"]
    session.check(said[-1], running)


def test_codex_reads_the_list_of_models(session: Session, running: Running) -> None:
    """Codex asks for the list if a command of its provider gives the key."""
    codex = find_program("codex")
    settings = documented("Codex", running, MODEL)
    key = f'[model_providers.headroom.auth]\ncommand = "echo"\nargs = ["{running.key}"]\n'
    session.write(".codex/config.toml", f"{settings}\n{key}")
    flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    session.run([codex, "exec", *flags, "Hello."], session.environment())
    listed = json.loads((session.home / ".codex" / "models_cache.json").read_text())["models"]
    assert [(model["slug"], model["context_window"]) for model in listed] == [(MODEL, CONTEXT)]


def test_codex_waits_while_a_long_prompt_is_read(session: Session) -> None:
    """Codex ends a stream after a time without events; here the prefill takes twice as long."""
    codex = find_program("codex")
    llm = FakeLLM(context=1 << 20)
    llm.engine.prefill_s = 6.0
    with serving(llm, Options(port=0, keep_alive=0.5)) as server:
        running = Running(server.address, "none", llm.engine, MANNERS["qwen3"])
        provider = 'wire_api = "responses"\n'
        settings = documented("Codex", running, MODEL)
        settings = settings.replace(provider, f"{provider}stream_idle_timeout_ms = 3000\n")
        session.write(".codex/config.toml", settings)
        flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
        printed = session.run([codex, "exec", *flags, "Hello."], session.environment())
    assert llm.engine.words in printed
    assert "Reconnecting" not in printed


@pytest.mark.parametrize("key", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"])
def test_claude_code_reads_and_writes_a_file(session: Session, running: Running, key: str) -> None:
    claude = find_program("claude")
    follow(
        running,
        read=("Read", {"file_path": str(session.folder / "note.txt")}),
        write=("Bash", {"command": "echo {word} > answer.txt", "description": "Write the word"}),
    )
    lines = documented("Claude Code", running, MODEL).splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    variables[key] = variables.pop("ANTHROPIC_AUTH_TOKEN")
    command = [claude, "-p", TASK, "--output-format", "json", "--allowedTools", "Read", "Bash"]
    printed = session.run(command, session.environment(**variables))
    session.check(json.loads(printed)["result"], running)
    assert not [prompt for prompt in running.engine.prompts if "billing-header" in prompt]


def test_claude_code_reads_and_writes_a_file_in_a_terminal(
    session: Session, running: Running
) -> None:
    claude = find_program("claude")
    follow(
        running,
        read=("Read", {"file_path": str(session.folder / "note.txt")}),
        write=("Bash", {"command": "echo {word} > answer.txt", "description": "Write the word"}),
    )
    lines = documented("Claude Code", running, MODEL).splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    # What it asks a person only once: colours, and whether the folder is trusted.
    trusted = {str(session.folder): {"hasTrustDialogAccepted": True}}
    asked = {"hasCompletedOnboarding": True, "theme": "dark", "projects": trusted}
    (session.home / ".claude.json").write_text(json.dumps(asked))
    environment = session.environment(**variables) | {"TERM": "xterm-256color"}
    command = [claude, "--allowedTools", "Read", "Bash"]
    with Terminal(command, session.folder, environment) as terminal:
        terminal.wait_for("? for shortcuts")
        terminal.press(TASK)
        terminal.wait_for(TASK)
        terminal.press("\r")
        terminal.wait_for(f"The word is {session.word}.")
    session.check(f"The word is {session.word}.", running)


def test_opencode_reads_and_writes_a_file(session: Session, running: Running) -> None:
    opencode = find_program("opencode")
    settings = documented("OpenCode", running, MODEL)
    session.write(".config/opencode/opencode.json", settings)
    follow(
        running,
        read=("read", {"filePath": str(session.folder / "note.txt")}),
        write=("bash", {"command": "echo {word} > answer.txt", "description": "Write the word"}),
    )
    environment = session.environment(  # or it waits for what it cannot fetch
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
    )
    session.check(session.run([opencode, "run", TASK], environment), running)


@pytest.mark.parametrize("provider", ["openai", "ollama"])
def test_continue_reads_and_writes_a_file(
    session: Session, running: Running, provider: str
) -> None:
    cn = find_program("cn")
    settings = documented("Continue", running, MODEL)
    if provider == "ollama":
        settings = settings.replace("openai", "ollama").replace("/v1", "")
    session.write(".continue/config.yaml", settings)
    follow(
        running,
        read=("Read", {"filepath": str(session.folder / "note.txt")}),
        write=("Bash", {"command": "echo {word} > answer.txt"}),
    )
    environment = session.environment(CONTINUE_TELEMETRY_ENABLED="0")
    config = str(session.home / ".continue" / "config.yaml")
    session.check(session.run([cn, "-p", "--auto", "--config", config, TASK], environment), running)


def test_qwen_code_reads_and_writes_a_file(session: Session, running: Running) -> None:
    qwen = find_program("qwen")
    follow(
        running,
        read=("read_file", {"file_path": str(session.folder / "note.txt")}),
        write=("run_shell_command", {"command": "echo {word} > answer.txt"}),
    )
    lines = documented("Qwen Code", running, MODEL).splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    # Qwen Code would use a proxy for loopback addresses, too.
    quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}
    session.write(".qwen/settings.json", json.dumps(quiet))
    environment = session.environment(**variables)
    del environment["HTTP_PROXY"], environment["HTTPS_PROXY"]
    command = [qwen, "--auth-type", "openai", "--approval-mode", "yolo", "-p", TASK]
    session.check(session.run(command, environment), running)
