"""Prefixes in files: an engine that starts again begins where the last one was."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.engine import prefix_folder
from headroom.engine.prefix_disk import PrefixDisk
from headroom.engine.prefix_file import SUFFIX, read_blocks
from headroom.errors import OptionError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.split.pipeline import PipelineFiles
from tests.engine.test_prefixes import PROMPT, WAYS, Asker, Heard, words
from tests.families.oracles import variant

LONG = PROMPT + words("long", 200)  # 350 tokens


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("prefix files") / "m.gguf"
    return open_checkpoint(variant(request.param).save_gguf(path))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def ask_and_end(checkpoint: Checkpoint, folder: Path, prompt: list[int], **settings: Any) -> None:
    """Ask one request of a new engine, and end the engine, which writes the files."""
    asker = Asker(checkpoint, cache_dir=str(folder), **settings)
    asker.ask(prompt)
    asker.engine.close()


@pytest.mark.parametrize(
    "checkpoint",
    ["llama", "mistral", "qwen35", "qwen35moe", "laguna", "gemma4-31b", "gemma4-e4b"],
    indirect=True,
)
@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_a_warm_answer_after_a_restart_is_the_cold_one(
    checkpoint: Checkpoint, device: str, tmp_path: Path
) -> None:
    ask_and_end(checkpoint, tmp_path, LONG, device=device)
    assert len(files(tmp_path)) == 1
    branch = LONG[:330] + words("branch", 40)
    longer = LONG + words("longer", 40)
    for way in WAYS:
        for prompt, least in ((LONG, 256), (longer, 320), (branch, 256)):
            asker = Asker(checkpoint, cache_dir=str(tmp_path), device=device)
            warm = asker.ask(prompt, way)
            asker.ask(words("other", 120), key=None)
            cold = asker.ask(prompt, way, key=None)
            assert warm.tokens == cold.tokens
            assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-3)
            assert least <= warm.cached <= len(prompt)
            asker.engine.close()


@pytest.mark.parametrize("checkpoint", ["qwen35", "gemma4-31b"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_whose_logits_are_in_a_file_needs_no_step(
    checkpoint: Checkpoint, way: str, tmp_path: Path
) -> None:
    prompt = LONG + words("after the last cut", 40)
    ask_and_end(checkpoint, tmp_path, prompt)
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    warm, computed = asker.ask(prompt, way), asker.engine.stats().prompt_tokens
    assert (warm.cached, computed) == (len(prompt), 0)
    asker.engine.close()
    alone = Asker(checkpoint, no_prefix_cache=True)
    cold = alone.ask(prompt, way)
    assert warm.tokens == cold.tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-3)
    alone.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_prompt_logprobs_are_those_of_every_row_whatever_the_files_have(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def scored(**settings: Any) -> list[float]:
        asker = Asker(checkpoint, **settings)
        event = asker.submit(LONG, prompt_logprobs=True, max_tokens=1).get(timeout=60)
        asker.engine.close()
        assert event.cached_tokens == 0
        return [one.logprob for one in event.prompt_logprobs if one is not None]

    ask_and_end(checkpoint, tmp_path, LONG)
    found = scored(cache_dir=str(tmp_path))
    assert len(found) == len(LONG) - 1
    assert found == pytest.approx(scored(no_prefix_cache=True), abs=1e-3)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_file_that_is_read_between_two_looks_is_used(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_and_end(checkpoint, tmp_path, LONG)
    collect, read, found = PrefixDisk.collect, threading.Event(), []

    def look_then_wait(disk: PrefixDisk) -> None:
        collect(disk)
        if disk._loads and not found:  # until the thread has read the file
            read.set()
            until(lambda: disk.has_news)
            found.append(True)

    def late(*given: Any) -> list[bytes]:
        assert read.wait(20)
        return read_blocks(*given)

    monkeypatch.setattr(PrefixDisk, "collect", look_then_wait)
    monkeypatch.setattr(prefix_folder, "read_blocks", late)
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    assert asker.ask(LONG).cached == 320
    assert found
    asker.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_what_the_caches_lose_while_it_is_written_makes_no_file(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reading, lost = threading.Event(), threading.Event()
    read_page = PipelineFiles.read_page

    def slow(caches: PipelineFiles, page: int) -> torch.Tensor:
        found = read_page(caches, page)
        reading.set()
        assert lost.wait(20)
        return found

    monkeypatch.setattr(PipelineFiles, "read_page", slow)
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    with caplog.at_level(logging.INFO):
        asker.ask(LONG)
        assert reading.wait(20)
        asker.engine._between_steps(asker.engine._prefixes.clear).result(20)
        lost.set()
        until(lambda: "tokens are not written" in caplog.text)
    assert not files(tmp_path)
    until(lambda: asker.engine.stats().cache_pages_used == 0)
    asker.ask(LONG)  # writes go on
    asker.engine.close()
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_a_prefix_with_most_pages_is_written_unless_a_request_needs_them(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read_page = PipelineFiles.read_page

    def slow(caches: PipelineFiles, page: int) -> torch.Tensor:
        found = read_page(caches, page)
        reading.set()
        assert go_on.wait(20)
        return found

    asker = Asker(checkpoint, cache_dir=str(tmp_path), parallel=1, cache_tokens=512)
    asker.ask(LONG)  # six of eight pages
    until(lambda: len(files(tmp_path)) == 1)
    monkeypatch.setattr(PipelineFiles, "read_page", slow)
    asker.ask(words("needs pages", 350))
    assert reading.wait(20)
    disk = asker.engine._prefixes._disk
    assert disk is not None
    before = disk._given_up
    waiting = asker.submit(words("other", 350), key=None)
    until(lambda: disk._given_up > before)
    go_on.set()
    assert len(Heard(waiting).tokens) == 6
    asker.engine.close()
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_types_are_kept_as_they_are_in_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ask_and_end(checkpoint, tmp_path, LONG, kv_type="q8_0")
    asker = Asker(checkpoint, cache_dir=str(tmp_path), kv_type="q8_0")
    warm = asker.ask(LONG)
    assert warm.cached >= 256
    assert warm.tokens == asker.ask(LONG, key=None).tokens
    page = asker.engine.list_prefixes().result(20).page_bytes
    assert files(tmp_path)[0].stat().st_size > 5 * page
    plain = Asker(checkpoint)
    assert page < plain.engine.list_prefixes().result(20).page_bytes / 3
    for one in (asker, plain):
        one.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35"], indirect=True)
def test_what_memory_gave_up_comes_back_from_its_file(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    prompts = [words(i, 330) for i in range(6)]  # 16 pages hold three of them
    cold = [asker.ask(one, key=None).tokens for one in prompts]
    for _ in range(2):
        for prompt, tokens in zip(prompts, cold, strict=True):
            assert asker.ask(prompt).tokens == tokens
            until(lambda: asker.engine.stats().cache_pages_used == 0)
    assert all(asker.ask(one).cached >= 256 for one in prompts)
    asker.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_damaged_files_are_removed_and_the_prompt_is_computed(
    checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask_and_end(checkpoint, tmp_path, LONG)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        warm = asker.ask(LONG)
    assert warm.cached == 0
    assert warm.tokens == asker.ask(LONG, key=None).tokens
    assert "wrong checksum" in caplog.text
    asker.engine.close()
    path.write_bytes(data[:1000])
    with caplog.at_level(logging.WARNING):
        Asker(checkpoint, cache_dir=str(tmp_path)).engine.close()
    assert not path.exists()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_files_of_other_caches_and_keys_are_left_alone(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ask_and_end(checkpoint, tmp_path, LONG)
    for settings in ({"kv_type": "f16"}, {"device": "cpu,cpu"}, {"dtype": "int8"}):
        asker = Asker(checkpoint, cache_dir=str(tmp_path), **settings)
        assert asker.ask(LONG).cached == 0
        asker.engine.close()
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    assert asker.ask(LONG, key="other").cached == 0
    assert asker.ask(LONG).cached >= 256
    asker.engine.close()
    assert len(files(tmp_path)) == 5


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_file_of_another_process_is_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    one, other = (Asker(checkpoint, cache_dir=str(tmp_path)) for _ in range(2))
    one.ask(LONG)
    until(lambda: bool(files(tmp_path)))
    other.ask(words("first", 10))  # sees that the folder has changed
    until(lambda: other.ask(LONG + words(time.monotonic(), 9)).cached >= 256)
    for asker in (one, other):
        asker.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_longer_prefix_takes_the_place_of_its_beginning(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    ask_and_end(checkpoint, tmp_path, LONG)
    ask_and_end(checkpoint, tmp_path, LONG + words("more", 100))
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_the_files_stay_within_their_budget(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ask_and_end(checkpoint, tmp_path, words(0, 330))
    size = files(tmp_path)[0].stat().st_size
    for number in range(1, 5):
        ask_and_end(checkpoint, tmp_path, words(number, 330), cache_bytes=f"{2 * size + 100}B")
        assert len(files(tmp_path)) == 2
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    assert [asker.ask(words(number, 330)).cached > 0 for number in range(5)] == [
        False, False, False, True, True,
    ]  # fmt: skip
    asker.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_answers_go_on_when_the_disk_is_full(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    def full(*given: object) -> int:
        tries.append(given)
        raise OSError(errno.ENOSPC, "No space left on device")

    write = prefix_folder.write_prefix
    monkeypatch.setattr(prefix_folder, "write_prefix", full)
    monkeypatch.setattr(prefix_folder, "PAUSE_S", 0.0)
    asker = Asker(checkpoint, cache_dir=str(tmp_path))
    with caplog.at_level(logging.INFO):
        for number in range(3):
            asker.ask(words(number, 330))
        until(lambda: "nothing is written" in caplog.text)
        until(lambda: asker.engine.stats().cache_pages_used == 0)
        assert asker.ask(words(2, 330)).cached >= 256
        until(lambda: len(tries) == 4)
        monkeypatch.setattr(prefix_folder, "write_prefix", write)
        asker.ask(words(3, 330))
        until(lambda: "files are written to" in caplog.text)
    assert len(files(tmp_path)) == 1
    assert caplog.text.count("No space left on device") == 1
    asker.engine.close()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_folder_that_cannot_be_used_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="prefix cache cannot be used") as refused:
        Asker(checkpoint, cache_dir=str(tmp_path / "file"))
    assert refused.value.param == "cache_dir"
