"""A server whose workers are killed: every client is answered, and the server goes on or ends."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.server.http_server import bind
from tests.server.fakes import wait_until
from tests.tiny import llama_config, random_model, save_gguf

STREAMS = 8
BODY: dict[str, Any] = {"prompt": [3, 5, 7], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(llama_config(num_hidden_layers=4))
    return save_gguf(model, tmp_path_factory.mktemp("workers") / "m.gguf")


@contextmanager
def served(path: Path, *more: str) -> Iterator["tuple[subprocess.Popen[bytes], httpx.Client]"]:
    """Serve a model by two workers in a process; yield the process and a client.

    The process writes its log beside the model.
    """
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    line = ["serve", str(path), "--workers", "2", "--port", str(port), "--threads", "1"]
    size = ["--context", "512", "--parallel", str(STREAMS), "--device", "cpu"]
    command = [sys.executable, "-m", "headroom", *line, *size, *more]
    with (
        log_of(path).open("wb") as told,
        subprocess.Popen(command, stderr=told) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_ready(client), 60)
            assert process.poll() is None
            yield process, client
        finally:
            process.terminate()
            process.wait(timeout=60)


def log_of(path: Path) -> Path:
    return path.with_suffix(".log")


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def workers_of(process: "subprocess.Popen[bytes]") -> list[int]:
    """Return the ids of a server's worker processes."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return sorted(int(word) for task in tasks for word in task.read_text().split())


def memory_of(process: "subprocess.Popen[bytes]") -> int:
    """Return the pages of memory that a process holds."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])


def stream(client: httpx.Client) -> str:
    """Ask for a long answer; return its finish reason, or "error"."""
    body = BODY | {"stream": True, "max_tokens": 480}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        reason = ""
        for text in answer.iter_lines():
            if not text.startswith("data: {"):
                continue
            event = json.loads(text.removeprefix("data: "))
            if "error" in event:
                return "error"
            reason = event["choices"][0]["finish_reason"] or reason
    return reason


@pytest.mark.slow
def test_twenty_killed_workers_leave_every_client_with_an_answer_or_an_error(path: Path) -> None:
    draw = random.Random(11)
    with served(path, "--worker-restarts", "30") as (process, client):

        def ask() -> str:
            answer = client.post("/v1/completions", json=BODY | {"max_tokens": 20})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        before, sizes = ask(), []
        with ThreadPoolExecutor(STREAMS) as pool:
            for _ in range(20):
                streams = [pool.submit(stream, client) for _ in range(STREAMS)]
                time.sleep(draw.uniform(0.1, 1.0))
                os.kill(draw.choice(workers_of(process)), signal.SIGKILL)
                lost_at = time.monotonic()
                assert {one.result(timeout=10) for one in streams} <= {"error", "length"}
                assert time.monotonic() - lost_at < 10
                assert ask() == before
                sizes.append(memory_of(process))
        assert max(sizes[10:]) < sizes[9] * 1.05
        assert len(workers_of(process)) == 2


@pytest.mark.slow
def test_the_server_exits_where_a_lost_worker_is_to_stop_it(path: Path) -> None:
    with served(path, "--on-worker-loss", "stop") as (process, _):
        os.kill(workers_of(process)[0], signal.SIGKILL)
        assert process.wait(timeout=30) == 1
    assert "error: Worker 1 on localhost" in log_of(path).read_text()
