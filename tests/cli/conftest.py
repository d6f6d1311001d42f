"""A model that is not there: answers that commands can be tested with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from headroom.engine.request import SamplingParams, Timings
from headroom.errors import RequestError
from headroom.options import Options, variable


class FakeLLM:
    """Says the same words whatever it is asked, and remembers what that was."""

    name = "fake"
    context = 64

    def __init__(self, words: Sequence[str] = ("Hello", " there", "."), interrupt: bool = False):
        self.words = words
        self.interrupt = interrupt  # Ctrl-C is pressed after the first word
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []
        self.closed_early = False
        self.finish_reason = "stop"
        self.thought = ""  # said before the words

    default_sampling: Mapping[str, Any] = {"temperature": 0.6}

    def sampling(self, **settings: Any) -> SamplingParams:
        return SamplingParams(**{**self.default_sampling, **settings})

    def stream_chat(self, messages: Any, params: SamplingParams) -> Iterator[Any]:
        self.asked.append([dict(message) for message in messages])
        self.params.append(params)
        if "refuse" in messages[-1]["content"]:
            raise RequestError("The prompt has 99 tokens.", hint="The context holds 64.")
        return self._pieces()

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Any]:
        return self.stream_chat([{"role": "raw", "content": prompt}], params)

    def chat(self, messages: Any, params: SamplingParams) -> Any:
        text = "".join(piece.text for piece in self.stream_chat(messages, params))
        return SimpleNamespace(
            text=text,
            thought="",
            token_ids=(5, 6, 7),
            finish_reason=self.finish_reason,
            prompt_tokens=4,
            generated_tokens=3,
            timings=Timings(queue_s=0.0, prefill_s=0.5, decode_s=0.25),
        )

    def generate(self, prompt: str, params: SamplingParams) -> list[Any]:
        return [self.chat([{"role": "raw", "content": prompt}], params)]

    def _pieces(self) -> Iterator[Any]:
        try:
            for number, word in enumerate(self.words):
                if self.interrupt and number == 1:
                    raise KeyboardInterrupt
                last = number + 1 == len(self.words)
                yield SimpleNamespace(
                    text=word,
                    thought=self.thought if number == 0 else "",
                    token=number,
                    finish_reason=self.finish_reason if last else None,
                    generated_tokens=number + 1,
                )
        except GeneratorExit:
            self.closed_early = True
            raise


@pytest.fixture
def fake_llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def opened(fake_llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Let commands open the fake model; the list collects the options they open it with."""
    seen: list[Options] = []

    @contextmanager
    def open_fake(options: Options, models: object = None) -> Iterator[FakeLLM]:
        seen.append(options)
        yield fake_llm

    for function in ("run.open_llm", "chat.open_llm", "serve.open_shelf"):
        monkeypatch.setattr(f"headroom.cli.{function}", open_fake)
    return seen


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in fields(Options):
        if setting.name != "home":
            monkeypatch.delenv(variable(setting), raising=False)
    monkeypatch.delenv("HEADROOM_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
