"""Load a real server with chats, long prompts, cancellations and repeated prompts; watch memory.

`python -m tests.server.mixed_load` starts `headroom serve` in a process of its own, for an hour and
with all three tiers of the prefix cache, each far too small for what is asked. Some prompts are
asked again and again: their answers must be those that they got when nothing was cached. At the end
the server must hold no request and no page, and after the first `--warm` minutes its memory must
have stayed within 1 %.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.server.soak import CHAT, Soak, serve, text_of, value
from tests.synth_models import write_model

REPEATED = 24  # prompts that are asked again and again
TURNS = 6  # of a chat
LONG_WORDS = 300
WORDS = ("tree", "river", "stone", "cloud", "wind", "moss", "fern", "lake")
FLAGS = (
    *("--device", "cpu", "--context", "2048", "--parallel", "6", "--queue", "64"),
    *("--cache-tokens", "8192", "--cache-ram", "24MiB", "--cache-bytes", "48MiB"),
)
FLAT = 0.01  # of the memory after the warm-up
MINUTE = 60  # looks at memory: one a second


def words(seed: str, count: int) -> str:
    """Return random words."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


@dataclass(slots=True)
class Load:
    """What is asked of a server, and what came of it."""

    soak: Soak
    until: float = 0.0  # time.monotonic()
    cached_tokens: int = 0
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def ask(self, messages: list[dict[str, str]], most: int, events: int = -1) -> str:
        """Return an answer; leave after so many events, if that is not negative."""
        body = {"messages": messages, "max_tokens": most, "temperature": 0, "stream": True}
        text = ""
        async with (
            httpx.AsyncClient(base_url=self.soak.address, timeout=300) as client,
            client.stream("POST", CHAT, json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                text += text_of(line)
                events -= 1
                if events == 0:
                    break
        return text

    def repeated(self, number: int) -> list[dict[str, str]]:
        """Return a prompt that is asked again and again; every third one is long."""
        count = LONG_WORDS if number % 3 == 0 else 20 + 8 * number
        shared = words(f"shared {number % 4}", count // 2)  # four beginnings
        return [{"role": "user", "content": f"{shared} {words(f'own {number}', count // 2)}"}]

    async def repeat(self, draw: random.Random) -> None:
        """Ask a repeated prompt, and compare the answer with the first one."""
        number = draw.randrange(REPEATED)
        text = await self.ask(self.repeated(number), 24)
        self.done["repeated"] += 1
        if text != self.soak.answers[number]:
            self.wrong.append(f"prompt {number}: {text!r}, not {self.soak.answers[number]!r}")

    async def chat(self, draw: random.Random) -> None:
        """Talk for some turns, each with all that was said before."""
        messages: list[dict[str, str]] = []
        for turn in range(1 + draw.randrange(TURNS)):
            text = words(f"{draw.random()} {turn}", 4 + draw.randrange(30))
            messages.append({"role": "user", "content": text})
            answer = await self.ask(messages, 8 + draw.randrange(40))
            messages.append({"role": "assistant", "content": answer})
            self.done["turns"] += 1

    async def read(self, draw: random.Random) -> None:
        """Ask a long prompt that nobody has asked before."""
        text = words(str(draw.random()), LONG_WORDS)
        await self.ask([{"role": "user", "content": text}], 4)
        self.done["long"] += 1

    async def leave(self, draw: random.Random) -> None:
        """Leave at the beginning of an answer, or in the middle of it."""
        await self.ask(self.repeated(draw.randrange(REPEATED)), 200, 1 + draw.randrange(12))
        self.done["left"] += 1

    async def client(self, name: int) -> None:
        """Do one thing after the other until the time is over."""
        draw = random.Random(f"client {name}")
        kinds = (self.repeat, self.repeat, self.chat, self.read, self.leave)
        while time.monotonic() < self.until:
            try:
                await draw.choice(kinds)(draw)
            except (httpx.HTTPError, RuntimeError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    async def watch(self) -> None:
        """Note every second what the server holds."""
        while time.monotonic() < self.until:
            self.soak.note()
            await asyncio.sleep(1.0)

    async def run(self, minutes: float, clients: int) -> None:
        """Run the whole load."""
        for number in range(REPEATED):
            self.soak.answers[number] = await self.ask(self.repeated(number), 24)
        self.until = time.monotonic() + 60 * minutes
        await asyncio.gather(self.watch(), *(self.client(name) for name in range(clients)))
        await asyncio.sleep(2.0)
        self.soak.note()


def memory_wrong(memory_mib: list[float], warm: int) -> list[str]:
    """Return what is wrong with memory after the first `warm` looks, by means of a minute."""
    means = [
        sum(part) / len(part)
        for at in range(warm, len(memory_mib), MINUTE)
        if len(part := memory_mib[at : at + MINUTE]) >= MINUTE // 2
    ]
    if len(means) < 2:
        return []
    print(f"memory after the warm-up: {min(means):.1f} to {max(means):.1f} MiB, by minutes")
    grown = max(means) / means[0] - 1
    return [f"memory grew by {100 * grown:.1f} % to {max(means):.0f} MiB"] if grown > FLAT else []


@contextmanager
def loaded_server(model: str, folder: str, *flags: str) -> Iterator[Load]:
    """Start a server with all tiers of the prefix cache."""
    with serve(model, *FLAGS, "--cache-dir", f"{folder}/prefixes", *flags) as (address, pid):
        yield Load(Soak(address, pid))


def metrics_of(address: str) -> dict[str, float]:
    """Return the server's metrics by name."""
    lines = httpx.get(address + "/metrics", timeout=30).text.splitlines()
    return {line.split()[0].partition("{")[0]: value(line) for line in lines if line[0] != "#"}


def load_server(minutes: float, warm: float, clients: int, model: str = "") -> list[str]:
    """Start a server and load it; print figures, and return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = model or str(write_model("qwen35", "q8_0", Path(folder), few_layers=True))
        with loaded_server(path, folder) as load:
            asyncio.run(load.run(minutes, clients))
            found: dict[str, Any] = metrics_of(load.soak.address)
            wrong = load.wrong
            for name in ("requests_running", "requests_waiting", "cache_pages_used"):
                if found[f"headroom_{name}"]:
                    wrong.append(f"{name} is {found[f'headroom_{name}']}")
            wrong += memory_wrong(load.soak.memory_mib, int(60 * warm))
            load.soak.done = load.done
            print(load.soak.figures())
            for name, number in sorted(found.items()):
                if "prefix" in name or "cached" in name:
                    print(f"{name} {number:.0f}")
    return wrong


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--warm", type=float, default=10.0, help="minutes after which memory is flat"
    )
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--model", default="", help="a file; a small synthesised model if left out")
    given = parser.parse_args()
    wrong = load_server(given.minutes, given.warm, given.clients, given.model)
    for line in wrong[:20]:
        print("wrong:", line)
    print(f"{len(wrong)} things are wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
