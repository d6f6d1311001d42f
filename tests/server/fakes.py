"""A fake model: a test sets what it says and how fast."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headroom.engine.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Timings,
    TokenEvent,
    TokenLogprobs,
    TopToken,
    check_request,
)
from headroom.engine.stats import DeviceMemory, EngineStats, ExpertTelemetry
from headroom.errors import CapacityError
from headroom.llm import LLM, AnswerStream, ChatPrompt
from headroom.options import Options
from headroom.server.http_server import HttpServer, bind
from headroom.server.shelf import Shelf
from headroom.text.conversation import Conversation
from headroom.text.fill_in import FillIn
from headroom.text.grammar import GrammarCompiler
from headroom.text.long_texts import check_not_far_beyond
from headroom.text.reasoning import Reasoning
from headroom.text.tokenizer import Tokenizer
from headroom.text.tool_formats import find_tool_format

EOS, BOS = 256, 257
CONTEXT, VOCAB, HIDDEN = 4096, 258, 8
THOUGHTS = Reasoning(start="<think>", end="</think>", start_id=1, end_id=2, opened=False)
TIMINGS = Timings(queue_s=0.001, prefill_s=0.002, decode_s=0.003)


class FakeTokenizer:
    """Every byte is a token; two more begin and end a text."""

    vocab_size = VOCAB
    bos_id, eos_id = BOS, EOS
    bos_token, eos_token = "<s>", "</s>"
    stop_ids = frozenset([EOS])
    add_bos = True
    drops_blank = False

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        ids = list(text.removeprefix("<s>").encode())
        wants_bos = add_bos is not False or (special and text.startswith("<s>"))
        return [BOS, *ids] if wants_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return b"".join(self.token_bytes(token) for token in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else (b"</s>", b"<s>")[token_id - 256]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def find(self, token: str) -> int | None:
        return None

    def is_unused(self, token_id: int) -> bool:
        return False

    def is_control(self, token_id: int) -> bool:
        return token_id in (EOS, BOS)

    def encode_whole(self, text: str) -> list[int]:
        return self.encode(text)


class WordTokenizer(FakeTokenizer):
    """Every word is a token, with the blanks before it, and so is every full stop."""

    vocab_size = 1 << 16

    def __init__(self) -> None:
        self._words: list[str] = []  # by token, from VOCAB on

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        ids = []
        for word in re.findall(r"\s*(?:\.|[^\s.]+)|\s+", text):
            if word not in self._words:
                self._words.append(word)
            ids.append(VOCAB + self._words.index(word))
        return ids if add_bos is False else [BOS, *ids]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < VOCAB:
            return super().token_bytes(token_id)
        return self._words[token_id - VOCAB].encode()


class FakeEngine:
    """Answers `words`, a token every `pause_s` seconds, each request in a separate thread."""

    def __init__(self, tokenizer: FakeTokenizer, context: int) -> None:
        self._tokenizer = tokenizer
        self.context = context
        self.words = "Hello, world."
        self.alive = True
        self.trouble = ""
        self.capacity = 1000
        self.pause_s = 0.0
        self.prefill_s = 0.0
        self.fails_after: int | None = None  # tokens
        self.experts: ExpertTelemetry | None = None
        self.timings = TIMINGS
        self.reports_costs = False
        self.cost: dict[str, object] | None = None  # of experts; only the last event reports it
        self.takes: int | None = None  # requests in all; further ones are refused
        self.most_running = 0
        self.at_once: int | None = None  # requests that may run together; further ones are refused
        self.requests: list[GenerationRequest] = []
        self.finished: Counter[str] = Counter()
        self._cancelled: dict[str, threading.Event] = {}

    def check(self, request: GenerationRequest) -> None:
        check_request(request, self.context, self._tokenizer.vocab_size)

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        self.check(request)
        running = len(self.requests) - sum(self.finished.values())
        self.most_running = max(self.most_running, running + 1)
        if self.at_once is not None and running >= self.at_once:
            raise CapacityError(f"{running} requests run.", hint="Try again later.")
        if self.takes is not None and len(self.requests) >= self.takes:
            raise CapacityError(f"{self.takes} requests wait already.", hint="Try again later.")
        self.requests.append(request)
        self._cancelled[request.id] = threading.Event()
        threading.Thread(target=self._say, args=(request, on_event), daemon=True).start()

    def cancel(self, request_id: str) -> None:
        if request_id in self._cancelled:
            self._cancelled[request_id].set()

    def was_cancelled(self, request_id: str) -> bool:
        return self._cancelled[request_id].is_set()

    def stats(self) -> EngineStats:
        running = len(self.requests) - sum(self.finished.values())
        return EngineStats(
            requests_running=running,
            requests_waiting=0,
            requests_finished=dict(self.finished),
            prompt_tokens=7,
            generated_tokens=11,
            steps=5,
            step_s=0.5,
            preemptions=0,
            cache_pages_used=1,
            cache_pages_total=8,
            memory=[DeviceMemory("cpu", 256, 128), DeviceMemory("cuda:0", 4096, 1024, 8192)],
            experts=self.experts,
            started_at=0.0,
        )

    def _say(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        for event in self._events(request):
            if event.finish_reason is not None:
                self.finished[event.finish_reason] += 1
            on_event(event)

    def _events(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        gone = self._cancelled[request.id]
        gone.wait(self.prefill_s)
        if request.pooling is not None:
            yield self._vector(request)
            return
        words = self._tokenizer.encode(self.words, special=False, add_bos=False)
        for count, token in enumerate([*words, EOS]):
            gone.wait(self.pause_s)
            if self.fails_after == count:
                yield self._last(request, "error", count)
                return
            if gone.is_set():
                yield self._last(request, "cancelled", count)
                return
            event = self._token(request, token, count + 1)
            yield event
            if event.finish_reason is not None:
                return

    def _vector(self, request: GenerationRequest) -> TokenEvent:
        """Return as vector the counts of the prompt's tokens from 97 ("a") on."""
        if self.fails_after is not None:
            return self._last(request, "error", 0)
        counts = [request.prompt.count(97 + value) for value in range(HIDDEN)]
        vector = np.array(counts, dtype=np.float32)
        return replace(self._last(request, "stop", 0), vector=vector)

    def _last(self, request: GenerationRequest, reason: FinishReason, count: int) -> TokenEvent:
        return TokenEvent(
            request_id=request.id,
            finish_reason=reason,
            error="The step failed." if reason == "error" else "",
            prompt_tokens=len(request.prompt),
            generated_tokens=count,
            timings=self._timings(last=True),
        )

    def _timings(self, *, last: bool, first: bool = False) -> Timings:
        if first and not last:
            return replace(self.timings, decode_s=0.0)
        return replace(self.timings, experts=self.cost) if last and self.cost else self.timings

    def _token(self, request: GenerationRequest, token: int, count: int) -> TokenEvent:
        params = request.params
        reason: FinishReason | None = "stop" if token == EOS else None
        room = self.context - len(request.prompt)
        if reason is None and count in (params.max_tokens, room):
            reason = "length"
        return TokenEvent(
            request_id=request.id,
            token=token,
            logprobs=None if params.logprobs is None else self._logprobs(token, params),
            prompt_logprobs=self._of_prompt(request) if count == 1 else (),
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            generated_tokens=count,
            timings=self._timings(last=reason is not None, first=count == 1),
        )

    def _logprobs(self, token: int, params: SamplingParams) -> TokenLogprobs:
        top = tuple(TopToken(other, -0.5 - other) for other in range(params.logprobs or 0))
        return TokenLogprobs(float("-inf") if token == ord("H") else -0.25, top)

    def _of_prompt(self, request: GenerationRequest) -> tuple[TokenLogprobs | None, ...]:
        if not request.params.prompt_logprobs:
            return ()
        return (None, *(self._logprobs(token, request.params) for token in request.prompt[1:]))


class FakeLLM(LLM):
    """An LLM over a fake engine: nothing is loaded, and prompts are plain text."""

    name = "fake"
    hidden_size = HIDDEN
    pooling = "last"
    default_sampling: Mapping[str, Any] = {}

    def __init__(self, tokenizer: FakeTokenizer | None = None, context: int = CONTEXT) -> None:
        fake = tokenizer or FakeTokenizer()
        self.engine: Any = FakeEngine(fake, context)
        self.tokenizer: Any = fake
        self.context, self.vocab_size = context, fake.vocab_size
        self.fill_in: FillIn | None = None
        self.grammars = GrammarCompiler(cast(Tokenizer, fake), VOCAB)
        self.conversations: list[list[Mapping[str, Any]]] = []
        self.chats: list[Conversation] = []
        self.asked: list[list[dict[str, Any]]] = []  # messages given to `chat` or `stream_chat`
        self.thinks = False  # answers may begin with <think>
        self.template: Any = SimpleNamespace(source="{{ messages }} {{ tools }}")

    @property
    def reasoning(self) -> Reasoning | None:
        return THOUGHTS if self.thinks else None

    @property
    def params(self) -> list[SamplingParams]:
        """The sampling settings of each answer."""
        return [request.params for request in self.engine.requests]

    def stream_chat(self, messages: Any, *given: Any, **named: Any) -> AnswerStream:
        chat = messages.messages if isinstance(messages, Conversation) else messages
        self.asked.append([dict(message) for message in chat])
        return super().stream_chat(messages, *given, **named)

    @property
    def prompts(self) -> list[str]:
        """The prompt of each answer, without the token that begins it."""
        return [self.tokenizer.decode(request.prompt[1:]) for request in self.engine.requests]

    def prepare_chat(self, chat: Conversation, *, must_fit: bool = False) -> ChatPrompt:
        self.chats.append(chat)
        self.conversations.append(list(chat.messages))
        text = "".join(f"{turn['content']}\n" for turn in chat.messages)
        if must_fit:
            check_not_far_beyond(self.tokenizer, text, self.context)
        return ChatPrompt(
            tuple(self.tokenizer.encode(text)),
            reasoning=self.reasoning,
            in_thought=False,
            tools=() if chat.tool_choice.mode == "none" else chat.tools,
            tool_format=find_tool_format(self.tokenizer, None),
        )


@contextmanager
def serving(llm: LLM | Shelf, options: Options) -> Iterator[HttpServer]:
    """Run a server over a model, or a shelf of models, in a thread."""
    server = HttpServer(llm, options, bind(options.host, options.port))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield server
    finally:
        server.should_exit = True
        thread.join(timeout=20)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """Return the JSON of a stream's events; its end mark as a plain string."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line[:5] == "data:"]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def openai_usage(prompt: int, completion: int, thoughts: int = 0) -> dict[str, Any]:
    """Return the usage that OpenAI's endpoints report for these numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thoughts},
    }


def make_certificate(folder: Path, name: str, *, password: str = "") -> tuple[str, str]:
    """Write a self-signed certificate for 127.0.0.1 and its key, with the openssl program."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    hide = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *hide, "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return str(cert), str(key)


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program")
