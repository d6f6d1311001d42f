"""Worker processes keep prefixes together, and forget all of them when one process is lost."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headroom.engine.prefix_folder import key_digest
from headroom.llm import LLM
from headroom.machine.devices import HostRoom
from headroom.units import GIB
from tests.engine.test_prefixes import (
    PROMPT,
    SETTINGS,
    WAYS,
    LlmAsker,
    check_conversation,
    push_out,
    words,
)
from tests.families.oracles import variant
from tests.server.fakes import wait_until
from tests.split.test_workers import pids


@pytest.fixture(scope="module", params=["qwen3-tied", "qwen35"])
def asker(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[LlmAsker]:
    path: Path = tmp_path_factory.mktemp("workers") / "m.gguf"
    variant(request.param).save_gguf(path)
    settings = SETTINGS | {"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB"}
    settings["cache_dir"] = str(path.parent / "prefixes")
    with LLM(str(path), **settings, workers="2", worker_restarts=100) as llm:
        yield LlmAsker(llm)


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_answer_of_two_processes_is_the_cold_one(asker: LlmAsker, way: str) -> None:
    check_conversation(asker, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_answer_from_the_host_memory_of_two_processes_is_the_cold_one(
    asker: LlmAsker, way: str
) -> None:
    check_conversation(asker, way, lambda: push_out(asker))
    assert asker.engine.stats().prefixes.promoted_pages > 0


def test_workers_give_up_what_they_have_in_host_memory_when_this_runs_short(
    asker: LlmAsker,
) -> None:
    def look(room: HostRoom) -> None:
        pressure = asker.engine._prefixes.host_pressure
        asker.engine._between_steps(lambda: pressure.look(room)).result(60)

    cold = asker.ask(PROMPT, key=None)
    asker.ask(PROMPT)
    push_out(asker)
    for _ in range(2):
        look(HostRoom(GIB, 0))
    found = asker.engine.stats().prefixes
    assert (found.host_pages, found.snapshots) == (0, 0)
    assert asker.ask(PROMPT).tokens == cold.tokens
    look(HostRoom(GIB, GIB))
    check_conversation(asker, "greedy", lambda: push_out(asker))


@pytest.mark.parametrize("way", WAYS)
def test_a_warm_answer_from_a_file_of_two_processes_is_the_cold_one(
    asker: LlmAsker, way: str
) -> None:
    prompt = words(f"file {way}", 330)
    cold = asker.ask(prompt, way)
    disk = asker.engine._prefixes._disk
    assert disk is not None
    wait_until(lambda: disk._folder.find(key_digest(""), prompt, 330) is not None, 60)
    wait_until(lambda: asker.engine.stats().cache_pages_used == 0, 60)
    asker.engine._between_steps(asker.engine._prefixes._cache.clear).result(60)
    before = asker.engine.stats().prefixes.file_hits
    warm = asker.ask(prompt, way)
    assert asker.engine.stats().prefixes.file_hits == before + 1
    assert warm.cached >= 256
    assert warm.tokens == cold.tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-3)


LONG = words("long", 2000)
STARTS: list[Any] = [
    pytest.param(name, settings, id=f"{name}-{where}")
    for name in ("qwen3-tied", "qwen35", "laguna", "gemma4-31b")
    for where, settings in (
        ("one", {}),
        ("stages", {"device": "cpu,cpu"}),
        ("processes", {"workers": "2"}),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), STARTS)
def test_an_engine_that_starts_again_answers_a_known_prompt_of_2000_tokens_warm(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = variant(name).save_safetensors(tmp_path)
    config = (path / "config.json").read_text()
    longer = re.sub(r'("max_position_embeddings"): 512', r"\1: 4096", config)
    (path / "config.json").write_text(longer)
    own = SETTINGS | {"context": 4096, "chunk": 256, "cache_tokens": 4096} | settings
    folder = tmp_path / "prefixes"
    with LLM(str(path), **own, cache_dir=str(folder)) as llm:
        cold = LlmAsker(llm).ask(LONG)
    with LLM(str(path), **own, cache_dir=str(folder)) as llm:
        asker = LlmAsker(llm)
        for way in WAYS:
            warm = asker.ask(LONG, way)
            assert warm.cached >= 1936
            again = asker.ask(LONG, way, key=None)
            assert warm.tokens == again.tokens
            assert warm.logprobs == pytest.approx(again.logprobs, abs=1e-3)
            assert way != "greedy" or warm.tokens == cold.tokens
        assert asker.engine.stats().prefixes.file_hits == 1
    others: tuple[dict[str, Any], ...] = ({"kv_type": "f16"}, {"device": "cpu,cpu"}, {})
    for other in [x for x in others if x != settings]:  # other types, or another split
        changed = own | {"workers": None, "device": None} | other
        with LLM(str(path), **changed, cache_dir=str(folder)) as llm:
            assert LlmAsker(llm).ask(LONG).cached == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_that_are_killed_while_files_are_written_leave_whole_ones(tmp_path: Path) -> None:
    variant("qwen35").save_gguf(path := tmp_path / "m.gguf")
    prompts = [words(f"killed {number}", 400) for number in range(12)]
    own = SETTINGS | {"cache_dir": str(tmp_path / "prefixes"), "workers": "2"}
    random = Random("killed workers")
    with LLM(str(path), **own, worker_restarts=100) as llm:
        asker = LlmAsker(llm)
        for prompt in prompts:
            asker.ask(prompt)
            time.sleep(random.uniform(0.0, 0.02))
            os.kill(random.choice(pids(llm)), signal.SIGKILL)
            wait_until(lambda: bool(asker.engine.trouble), 60)
            wait_until(lambda: not asker.engine.trouble, 60)
    with LLM(str(path), **own) as llm:
        asker = LlmAsker(llm)
        found = 0
        for prompt in prompts:
            warm, cold = asker.ask(prompt), asker.ask(prompt, key=None)
            assert warm.tokens == cold.tokens
            found += warm.cached > 0
    assert found > 0


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("runs", [True, False], ids=["busy", "idle"])
def test_a_lost_worker_takes_all_prefixes_with_it(asker: LlmAsker, lost: int, runs: bool) -> None:
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
