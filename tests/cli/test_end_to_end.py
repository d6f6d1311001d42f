"""The commands as scripts use them: real processes, the real default model."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GREEDY = ("--temperature", "0", "--seed", "0")


def headroom(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a command line with `text` as its standard input."""
    line = [sys.executable, "-m", "headroom", *arguments]
    return subprocess.run(line, cwd=ROOT, input=text, capture_output=True, text=True, timeout=240)


def answer(*arguments: str) -> dict[str, Any]:
    """Run `headroom run --json` and return its one object."""
    done = headroom("run", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_run_gives_one_json_object_and_the_same_text_streamed(smollm2_path: Path) -> None:
    prompt = "What is the capital of France?"
    found = answer(str(smollm2_path), prompt, "--max-tokens", "12", *GREEDY)
    assert "Paris" in found["text"]
    usage = found["usage"]
    assert usage["completion_tokens"] == len(found["token_ids"]) <= 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["finish_reason"] in ("stop", "length")
    assert found["timings"]["prefill_s"] > 0
    streamed = headroom("run", str(smollm2_path), "-", "--max-tokens", "12", *GREEDY, text=prompt)
    assert streamed.stdout.strip() == found["text"].strip()


def test_raw_continues_the_text_and_the_seed_repeats_it(tiny_path: Path) -> None:
    line = (str(tiny_path), "Once upon a", "--raw", "--max-tokens", "8", "--seed", "5")
    line += ("--kv-type", "f32", "--ignore-eos")
    first, again = answer(*line), answer(*line, "--chunk", "2")
    assert first["token_ids"] == again["token_ids"]
    assert first["finish_reason"] == "length"
    tokens = headroom("tokenize", str(tiny_path), "Once upon a", "--json")
    assert first["usage"]["prompt_tokens"] == len(json.loads(tokens.stdout)["ids"])


def test_a_prompt_longer_than_the_context_is_one_line(tiny_path: Path) -> None:
    done = headroom("run", str(tiny_path), "word " * 200, "--context", "64", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(3))
    file = str(broken)
    for line in (["run", file, "hello"], ["plan", file], ["serve", file, "--port", "0"]):
        done = headroom(*line)
        assert done.returncode == 1
        # A server listens before it loads, and its log says so.
        told = [said for said in done.stderr.splitlines() if " I serve: " not in said]
        assert len(told) == 1
        assert told[0].startswith("error: ")


def test_chat_answers_lines_from_a_pipe(smollm2_path: Path) -> None:
    lines = "What is the capital of France?\n/set max_tokens 3\nAnd of Italy?\n"
    done = headroom("chat", str(smollm2_path), "--max-tokens", "12", *GREEDY, text=lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
    assert "max_tokens is 3." in done.stdout


def test_ctrl_c_stops_an_answer_in_a_terminal_and_ctrl_d_leaves(
    smollm2_path: Path, tmp_path: Path
) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite run in the background ignores it
        os.chdir(ROOT)
        os.environ["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody tells where the cursor is
        line = ["-m", "headroom", "chat", str(smollm2_path), "--ignore-eos", *GREEDY]
        line += ["--home", str(tmp_path)]  # for the history of messages
        os.execv(sys.executable, [sys.executable, *line])
    try:
        # A key counts for what it is only once the prompt is there: `>`.
        read_until(terminal, rb"/help for help.*>")
        os.write(terminal, b"Count from one to a thousand.\n")
        read_until(terminal, "\u280b.*\\?25h.*[a-z]{3}".encode())  # the answer is under way
        os.write(terminal, b"\x03")
        read_until(terminal, rb"stopped.*>")
        os.write(terminal, b"/reset\n")
        read_until(terminal, rb"forgotten.*>")
        os.write(terminal, b"\x04")
        assert exit_code(pid) == 0
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)


def read_until(terminal: int, wanted: bytes, limit_s: float = 120) -> None:
    """Read from a terminal until it has shown the pattern `wanted`."""
    shown, end = b"", time.monotonic() + limit_s
    while not re.search(wanted, shown, re.DOTALL):
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, f"{wanted!r} was not shown: {shown!r}"
        shown += os.read(terminal, 4096)


def exit_code(pid: int, limit_s: float = 60) -> int:
    """Wait for a process to end, but not for ever."""
    end = time.monotonic() + limit_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        assert time.monotonic() < end, "it never ended"
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])
