"""Load a real server with many clients, some of which leave or stall, and look for leaks.

`python -m tests.server.soak --minutes 20` starts `headroom serve` in a process of its own. First it
asks every question alone. Then clients ask them at random for the given time: a third of them leave
in the middle of an answer, a tenth stop reading, and all others compare what they get with the
answer that was given alone. Every fourth client that stops reading has asked for more than the
system's buffers hold, so that the server must wait for the client, and then disconnect it. At the
end the server must hold no request, no page of its cache and no descriptor more than at the start,
and its memory must not have grown after the first quarter.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.synth_models import write_model

QUESTIONS = 48
MOST_TOKENS = 96
STALL_S = 20.0
# A stream of so many answers and rivals has about 5 MB; the system's buffers hold 3 MB of it.
LONG_STREAM = {"max_tokens": 900, "n": 2, "logprobs": True, "top_logprobs": 20}
LONG_STALL_S = 150.0  # the stream needs some of them, the server's patience (READ_S) 60
LONG_SOAK_MINUTES = 5.0  # enough for some clients to be disconnected
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Soak:
    """What was asked and what came of it."""

    address: str
    pid: int
    answers: dict[int, str] = field(default_factory=dict)  # by question, each asked alone
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)  # every second
    descriptors: list[int] = field(default_factory=list)  # every second, the first one when idle

    def resident_mib(self) -> float:
        """Return the memory of the server's process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def open_descriptors(self) -> int:
        """Return the number of files and sockets that the server has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def note(self) -> None:
        """Note what the server holds now."""
        self.memory_mib.append(self.resident_mib())
        self.descriptors.append(self.open_descriptors())

    def figures(self) -> str:
        """Return what was done, and what the server held at the start, meanwhile and at the end."""
        memory, descriptors = self.memory_mib, self.descriptors
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.done.items()))
        eighths = ", ".join(f"{memory[len(memory) * part // 8]:.0f}" for part in range(8))
        return (
            f"{kinds}; memory after each eighth of the time {eighths}, {memory[-1]:.0f} MiB; "
            f"descriptors {descriptors[0]}, at most {max(descriptors)}, then {descriptors[-1]}"
        )


def question(number: int) -> dict[str, Any]:
    """Return the body of a question; every second one is answered at random, by its own seed."""
    draw = random.Random(number)
    words = " ".join(draw.choice(("tree", "river", "stone", "cloud")) for _ in range(number % 40))
    return {
        "messages": [{"role": "user", "content": f"{number}: {words}?"}],
        "max_tokens": 8 + draw.randrange(MOST_TOKENS - 8),
        "temperature": float(number % 2),
        "seed": number,
        "stream": True,
    }


def text_of(line: str) -> str:
    """Return the text that one line of a stream adds."""
    data = line.removeprefix("data: ")
    if not line.startswith("data: ") or data == "[DONE]":
        return ""
    chunk = json.loads(data)
    if "error" in chunk:
        raise RuntimeError(chunk["error"]["message"])
    delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Return the whole answer to a question."""
    text = ""
    async with client.stream("POST", CHAT, json=question(number)) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            text += text_of(line)
    return text


async def leave(client: httpx.AsyncClient, number: int, draw: random.Random) -> None:
    """Leave in the middle of an answer."""
    events = draw.randrange(12)
    async with client.stream("POST", CHAT, json=question(number)) as response:
        async for _ in response.aiter_lines():
            events -= 1
            if events < 0:
                break


async def stall(client: httpx.AsyncClient, number: int) -> None:
    """Read the beginning of an answer, then nothing for a while, then leave."""
    async with client.stream("POST", CHAT, json=question(number)) as response:
        async for _ in response.aiter_lines():
            break
        await asyncio.sleep(STALL_S)


async def stall_until_disconnected(address: str, number: int) -> bool:
    """Read nothing of a stream that fills every buffer; return whether the server ended it."""
    transport = httpx.AsyncHTTPTransport(socket_options=SMALL_BUFFER)
    body = {**question(number), **LONG_STREAM}
    async with (
        httpx.AsyncClient(base_url=address, transport=transport, timeout=300) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        await asyncio.sleep(LONG_STALL_S)
        try:
            async for _ in response.aiter_lines():
                pass
        except httpx.TransportError:
            return True
    return False


async def stream_worker(soak: Soak, name: int, until: float) -> None:
    """Ask one question after another, as one of the clients."""
    draw = random.Random(f"worker {name}")
    while time.monotonic() < until:
        number, fate = draw.randrange(QUESTIONS), draw.random()
        # A client that leaves closes its connection: each question has a client of its own.
        async with httpx.AsyncClient(base_url=soak.address, timeout=300) as client:
            if fate < 1 / 3:
                await leave(client, number, draw)
                soak.done["left"] += 1
            elif fate < 1 / 3 + 1 / 10:
                if draw.randrange(4):
                    await stall(client, number)
                    soak.done["stalled"] += 1
                elif await stall_until_disconnected(soak.address, number):
                    soak.done["stalled and disconnected"] += 1
                else:
                    soak.done["stalled with a full buffer"] += 1
            else:
                text = await ask(client, number)
                soak.done["answered"] += 1
                if text != soak.answers[number]:
                    soak.wrong.append(f"question {number}: {text!r}, not {soak.answers[number]!r}")


async def idle_worker(soak: Soak, until: float) -> None:
    """Keep one connection open, and ask for something small now and then."""
    limits = httpx.Limits(keepalive_expiry=None)
    async with httpx.AsyncClient(base_url=soak.address, timeout=120, limits=limits) as client:
        while time.monotonic() < until:
            response = await client.get("/v1/models")
            assert response.status_code == 200, response.text
            soak.done["small"] += 1
            await asyncio.sleep(min(10.0, max(0.0, until - time.monotonic())))


async def watch(soak: Soak, until: float) -> None:
    """Note every second what the server holds."""
    while time.monotonic() < until:
        soak.note()
        await asyncio.sleep(1.0)


async def run(soak: Soak, minutes: float, connections: int, streams: int) -> list[str]:
    """Run the whole soak; return what is wrong."""
    async with httpx.AsyncClient(base_url=soak.address, timeout=120) as client:
        for number in range(QUESTIONS):
            soak.answers[number] = await ask(client, number)
    soak.note()
    until = time.monotonic() + 60 * minutes
    await asyncio.gather(
        *(stream_worker(soak, name, until) for name in range(streams)),
        *(idle_worker(soak, until) for _ in range(connections - streams)),
        watch(soak, until),
    )
    await asyncio.sleep(2.0)
    soak.note()
    wrong = list(soak.wrong)
    metrics = httpx.get(soak.address + "/metrics").text
    for name in ("headroom_requests_running", "headroom_requests_waiting"):
        wrong += [line for line in metrics.splitlines() if line.startswith(name) and value(line)]
    wrong += [
        line
        for line in metrics.splitlines()
        if line.startswith("headroom_cache_pages_used") and value(line)
    ]
    before, left = soak.descriptors[0], soak.descriptors[-1]
    if left > before + 2:
        wrong.append(f"{left} descriptors are open, and {before} were at the start")
    if max(soak.descriptors) < before + 0.9 * connections:
        wrong.append(f"at most {max(soak.descriptors) - before} connections were open at once")
    if minutes >= LONG_SOAK_MINUTES and not soak.done["stalled and disconnected"]:
        wrong.append("no client that stopped reading was disconnected")
    start = soak.memory_mib[len(soak.memory_mib) // 4]
    if (grown := soak.memory_mib[-1] - start) > 0.05 * start + 20:
        wrong.append(f"memory grew by {grown:.0f} MiB after the first quarter, from {start:.0f}")
    return wrong


def value(line: str) -> float:
    """Return the value of one line of Prometheus' format."""
    return float(line.split()[-1])


@contextmanager
def serve(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Run `headroom serve`; yield its address and its process id."""
    command = [sys.executable, "-m", "headroom", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "serve: ready on" in line:
                break
        else:
            raise RuntimeError("the server did not start")
        # The log of requests must be read, or the pipe fills and the server waits.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield line.split()[-1], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def soak_server(minutes: float, connections: int, streams: int, model: str = "") -> list[str]:
    """Start a server and soak it; print figures, and return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = model or str(write_model("qwen3", "q8_0", Path(folder), few_layers=True))
        with serve(path, "--device", "cpu", "--context", "1024", "--parallel", "16") as started:
            address, pid = started
            soak = Soak(address, pid)
            wrong = asyncio.run(run(soak, minutes, connections, streams))
    print(soak.figures())
    return wrong


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--model", default="", help="a file; a small synthesised model if left out")
    given = parser.parse_args()
    wrong = soak_server(given.minutes, given.connections, given.streams, given.model)
    for line in wrong[:20]:
        print("wrong:", line)
    print(f"{len(wrong)} things are wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
