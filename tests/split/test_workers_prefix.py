"""Worker processes keep prefixes together, and forget all of them when one process is lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headroom.llm import LLM
from tests.engine.test_prefixes import (
    PROMPT,
    SETTINGS,
    WAYS,
    Asker,
    check_conversation,
    push_out,
    words,
)
from tests.families.oracles import variant
from tests.server.fakes import wait_until
from tests.split.test_workers import pids


class WorkersAsker(Asker):
    """Asks the engine of a model whose layers run in worker processes."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine, self.count = llm, llm.engine, 0


@pytest.fixture(scope="module", params=["qwen3-tied", "qwen35"])
def asker(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[WorkersAsker]:
    path: Path = tmp_path_factory.mktemp("workers") / "m.gguf"
    variant(request.param).save_gguf(path)
    settings = SETTINGS | {"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB"}
    with LLM(str(path), **settings, workers="2", worker_restarts=100) as llm:
        yield WorkersAsker(llm)


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_answer_of_two_processes_is_the_cold_one(asker: WorkersAsker, way: str) -> None:
    check_conversation(asker, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_answer_from_the_host_memory_of_two_processes_is_the_cold_one(
    asker: WorkersAsker, way: str
) -> None:
    check_conversation(asker, way, lambda: push_out(asker))
    assert asker.engine.stats().prefixes.promoted_pages > 0


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("runs", [True, False], ids=["busy", "idle"])
def test_a_lost_worker_takes_all_prefixes_with_it(
    asker: WorkersAsker, lost: int, runs: bool
) -> None:
    prompt = words(f"lost {lost} {runs}", 150)
    cold = asker.ask(prompt)
    assert asker.ask(prompt).cached > 0
    before = pids(asker.llm)
    if runs:
        running = asker.submit(PROMPT, max_tokens=300)
        assert running.get(timeout=60).finish_reason is None
    os.kill(before[lost], signal.SIGKILL)
    if runs:
        while (event := running.get(timeout=60)).finish_reason is None:
            pass
        assert event.finish_reason == "error"
    else:
        wait_until(lambda: bool(asker.engine.trouble) or before[lost] not in pids(asker.llm), 60)
    first, again = asker.ask(prompt), asker.ask(prompt)
    assert before[lost] not in pids(asker.llm)
    assert (first.cached, first.tokens) == (0, cold.tokens)
    assert again.cached > 0
    assert again.tokens == cold.tokens
    assert asker.engine.stats().cache_pages_used == 0
