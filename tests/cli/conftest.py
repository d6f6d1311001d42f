"""A model that is not there: answers that commands can be tested with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest

from headroom.engine.request import Timings
from headroom.options import Options, variable
from headroom.server.shelf import Shelf
from tests.server.fakes import FakeLLM, WordTokenizer


@pytest.fixture
def fake_llm() -> FakeLLM:
    """A model that answers "Hello there." in four tokens, the end of the answer included."""
    llm = FakeLLM(WordTokenizer(), context=64)
    llm.default_sampling = {"temperature": 0.6}
    llm.engine.words = "Hello there."
    llm.engine.timings = Timings(queue_s=0.0, prefill_s=0.5, decode_s=0.375)
    return llm


@pytest.fixture
def opened(fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Let commands open the fake model; the list collects the options they open it with."""
    seen: list[Options] = []

    @contextmanager
    def open_fake(options: Options, path: object = None) -> Iterator[FakeLLM]:
        seen.append(options)
        yield fake_llm

    @contextmanager
    def open_shelf(options: Options, models: object = None) -> Iterator[Shelf]:
        seen.append(options)
        yield Shelf.of_loaded(fake_llm, options)

    for function in ("run.open_llm", "chat.open_llm"):
        monkeypatch.setattr(f"headroom.cli.{function}", open_fake)
    monkeypatch.setattr("headroom.cli.serve.open_shelf", open_shelf)
    return seen


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in fields(Options):
        if setting.name != "home":
            monkeypatch.delenv(variable(setting), raising=False)
    monkeypatch.delenv("HEADROOM_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
