"""`headroom chat` and `run` as a person uses them: a real process in a terminal, the real model."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COLUMNS = 72
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
PASTE_MODES = re.compile(r"\x1b\[\?2004([hl])")
PROMPT = "> "
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


class Terminal:
    """A command in a terminal."""

    def __init__(self, *words: str) -> None:
        self.shown = ""  # all that was written, without the sequences that colour and move
        self.marks_pastes = False  # whether the program has asked for it
        self._read_to = 0
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite in the background ignores it
            os.chdir(ROOT)
            for name in ("COLUMNS", "NO_COLOR"):
                os.environ.pop(name, None)
            os.environ.update({"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"})
            os.execv(sys.executable, [sys.executable, "-m", "headroom", *words])
        size = struct.pack("HHHH", 40, COLUMNS, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def paste(self, text: str) -> None:
        """Do what terminals do with a pasted text."""
        keys = text.replace("\n", "\r")
        self.type(f"\x1b[200~{keys}\x1b[201~" if self.marks_pastes else keys)

    def until(self, pattern: str, limit_s: float = 60) -> str:
        """Return what is shown after the last call, up to a pattern."""
        end = time.monotonic() + limit_s
        while (found := re.compile(pattern, re.DOTALL).search(self.shown, self._read_to)) is None:
            ready, _, _ = select.select([self._terminal], [], [], max(0, end - time.monotonic()))
            assert ready, f"{pattern!r} was not shown: {self.shown[self._read_to :]!r}"
            text = os.read(self._terminal, 65536).decode(errors="replace")
            for asked in PASTE_MODES.findall(text):
                self.marks_pastes = asked == "h"
            self.shown = ESCAPES.sub("", self.shown + text)
        seen = self.shown[self._read_to : found.end()]
        self._read_to = found.end()
        return seen

    def end(self, limit_s: float = 60) -> int:
        """Return the exit code."""
        limit = time.monotonic() + limit_s
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            if select.select([self._terminal], [], [], 0.05)[0]:
                try:
                    os.read(self._terminal, 65536)
                except OSError:  # the other side is closed
                    time.sleep(0.05)
            assert time.monotonic() < limit, "it never ended"
        self._pid = 0
        return os.waitstatus_to_exitcode(ended[1])

    def close(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._terminal)


Start = Callable[..., Terminal]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start commands, and end them with the test."""
    started: list[Terminal] = []

    def begin(*words: str) -> Terminal:
        started.append(Terminal(*words))
        return started[-1]

    yield begin
    for terminal in started:
        terminal.close()


@pytest.fixture
def chat(start: Start, smollm2_path: Path, tmp_path: Path) -> Callable[..., Terminal]:
    """Start a chat whose history is in the test's folder."""

    def begin(*more: str) -> Terminal:
        words = ("chat", str(smollm2_path), "--home", str(tmp_path), "--seed", "1", *more)
        terminal = start(*words)
        terminal.until(r"/help\s+for\s+help\..*> ")
        return terminal

    return begin


def test_a_paste_of_several_lines_is_one_message_and_comes_back_in_the_next_chat(
    chat: Start,
) -> None:
    first = chat("--max-tokens", "4")
    first.type("\x1b[200~Repeat:\nred\ngreen\x1b[201~")
    first.until(r"green")
    first.type("\r")
    first.until(r"4 tokens.*> ")
    first.type("/tokens\r")
    first.until(r"1 turn, \d+ of 8192 tokens.*> ")
    first.type(CTRL_D)
    assert first.end() == 0
    second = chat("--max-tokens", "4")
    second.type(UP + UP)  # before /tokens
    second.until(r"Repeat:.*red.*green")
    second.type(CTRL_C + CTRL_D)
    assert second.end() == 0


def test_a_paste_during_an_answer_is_one_message_too(chat: Start) -> None:
    terminal = chat("--max-tokens", "40", "--ignore-eos")
    terminal.type("Count from one to a thousand.\r")
    terminal.until(r"\n[A-Z1]")  # the answer has begun
    terminal.paste(f"Repeat:\n{'long ' * 700}\nend")
    terminal.until(r"40 tokens.*> .*end")  # the window is too low for the other lines
    terminal.type("\r")
    terminal.until(r"40 tokens.*> ")
    terminal.type("/tokens\r")
    told = re.search(r"2 turns, (\d+) of 8192 tokens", terminal.until(r"2 turns, .*> "))
    assert told is not None
    assert int(told[1]) > 700  # every word of the long line arrived
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_a_paste_while_the_model_is_loaded_is_one_message_too(
    start: Start, smollm2_path: Path, tmp_path: Path
) -> None:
    words = ("chat", str(smollm2_path), "--home", str(tmp_path), "--seed", "1")
    terminal = start(*words, "--max-tokens", "4")
    terminal.until("loading")
    terminal.paste("Repeat:\nred\ngreen")
    terminal.until(r"> .*Repeat:.*red.*green")
    terminal.type("\r")
    terminal.until(r"4 tokens.*> ")
    terminal.type("/tokens\r")
    terminal.until(r"1 turn, .*> ")


def test_words_are_wrapped_and_none_is_cut(chat: Start) -> None:
    terminal = chat("--max-tokens", "80", "--temperature", "0")
    terminal.type("Tell me about the sea in one long paragraph.\r")
    terminal.until(r"\r\n")
    lines = terminal.until(r"80 tokens,").replace("\r", "").split("\n")[:-1]
    assert len(lines) > 3
    assert max(map(len, lines[:-1])) <= COLUMNS
    assert not any(line.startswith(" ") for line in lines)


def test_ctrl_c_stops_an_answer_and_twice_leaves(chat: Start) -> None:
    terminal = chat("--ignore-eos")
    terminal.type("Count from one to a thousand.\r")
    terminal.until(r"\n[A-Z1].*\n")  # a line of the answer
    terminal.type(CTRL_C)
    terminal.until(r"tokens/s, stopped.*> ")
    terminal.type("/tokens\r")
    terminal.until(r"1 turn.*> ")  # what came of the answer stays
    terminal.type(CTRL_C)
    terminal.until(r"Ctrl-C again.*> ")
    terminal.type(CTRL_C)
    assert terminal.end() == 0


def test_a_conversation_longer_than_the_context_goes_on(chat: Start) -> None:
    terminal = chat("--context", "192", "--max-tokens", "24", "--ignore-eos")
    for number in range(6):
        terminal.type(f"Tell me a story about {number} cats, please, and about the sea.\r")
        terminal.until(r"24 tokens,.*> ")
    assert "The oldest turn is left out" in terminal.shown
    assert "error" not in terminal.shown
    terminal.type(f"{'word ' * 300}\r")
    terminal.until(r"error: The message has \d+ tokens, and the context\s+holds 192, the")


def test_a_conversation_is_saved_and_loaded_and_an_answer_given_again(
    chat: Start, tmp_path: Path
) -> None:
    file = tmp_path / "sea.json"
    first = chat("--max-tokens", "8")
    for keys, shown in (
        ("Tell me about the sea.\r", r"8 tokens"),
        ("/regenerate\r", r"8 tokens"),
        (f"/save {file}\r", r"1 turn saved"),
        ("/set temp\t 0.5\r", r"temperature is 0\.5\."),
        ("/set temperature hot\r", r"temperature is 'hot', not a number"),
        ("/exit\r", r"/exit"),
    ):
        for part in re.split(r"(?<=\t)", keys):  # a person waits for what Tab gives
            first.type(part)
            time.sleep(0.3)
        first.until(shown)
    assert first.end() == 0
    saved = json.loads(file.read_text())
    assert [turn["question"] for turn in saved["turns"]] == ["Tell me about the sea."]
    second = chat("--load", str(file))
    second.type("/tokens\r")
    second.until(r"1 turn")
    second.type("/stats\r")
    second.until(r"error: There is no answer yet")


def test_an_answer_matches_its_schema_and_statistics_follow(
    start: Start, smollm2_path: Path, tmp_path: Path
) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "notes.txt").write_text("Rome is the capital of Italy.")
    words = ("run", str(smollm2_path), "Which city is it?", "-f", str(tmp_path / "notes.txt"))
    terminal = start(*words, "--schema", str(tmp_path / "schema.json"), "--seed", "1")
    shown = terminal.until(r"first token [^\n]*tokens/s")
    answer = shown[shown.index("{") : shown.rindex("}") + 1]
    jsonschema.validate(json.loads(answer), schema)
    assert terminal.end() == 0
