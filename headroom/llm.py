"""LLM: the whole path as one readable function, and the Python API."""

import logging
import queue
import uuid
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from headroom.engine.engine import Engine
from headroom.engine.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Timings,
    TokenEvent,
    TokenLogprobs,
)
from headroom.errors import HeadroomError, ModelError
from headroom.formats.checkpoint import Checkpoint, open_checkpoint
from headroom.formats.hub import ALIASES, KNOWN_MODELS, find_model
from headroom.options import Options, load_options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan
from headroom.split.choice import make_run_plan
from headroom.split.expert_records import read_records
from headroom.split.launch import Progress, start_pipeline
from headroom.split.memory_check import limit_memory
from headroom.split.placing import find_placement
from headroom.split.upkeep import open_upkeep
from headroom.text.answer import AnswerText
from headroom.text.chat_template import ChatTemplate
from headroom.text.reasoning import find_reasoning
from headroom.text.tokenizer import Tokenizer
from headroom.units import gib

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Pieces = Generator["Piece", None, None]  # an answer as it comes; `close()` ends it early


def open_engine(
    checkpoint: Checkpoint, options: Options, progress: Progress = lambda done, total: None
) -> tuple[Engine, Plan]:
    """Go the whole way from a checkpoint to an engine that takes requests."""
    model = describe(checkpoint)  # headers only
    records = read_records(model, options)  # which experts were chosen, on earlier days
    plan = make_run_plan(model.shape, options)  # what the machine is, and what goes where
    for device in plan.devices:
        log.info(
            "plan: %s on %s, %s planned, %s free, context %d x %d",
            plan.model,
            device.name,
            gib(sum(line.bytes for line in device.lines if line.name != "reserve")),
            gib(device.free_bytes),
            plan.settings.context,
            plan.settings.parallel,
        )
    placement = find_placement(model.shape, plan, options, checkpoint.identity, records.file.counts)
    limit_memory(plan, options.device_memory)
    pipeline = start_pipeline(plan, model, progress, placement)  # weights on devices
    upkeep = open_upkeep(pipeline, records)  # of experts, between steps
    return Engine(pipeline, plan.settings, options.queue, upkeep), plan  # requests in, tokens out


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of an answer as it comes; the last piece has a finish reason."""

    text: str  # may be empty: half a character, or the start of a stop text
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    timings: Timings | None = None  # up to now


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    logprobs: tuple[TokenLogprobs, ...]  # one per token, where asked for
    timings: Timings


class LLM:
    """A model ready to answer; settings are those of `Options`, by the same names."""

    def __init__(
        self,
        model: str = "",
        *,
        options: Options | None = None,
        progress: Progress = lambda done, total: None,  # told the bytes loaded, and of all
        **settings: object,
    ) -> None:
        if options is None:
            options = load_options({**settings, "model": model or None})
        path = find_model(options.model, options.home_path)
        checkpoint = open_checkpoint(path)
        self.options = options
        self.name = options.served_name or model_name(options.model, path)
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        self.template = _template(checkpoint, self.tokenizer)
        self.reasoning = find_reasoning(self.tokenizer, self.template)
        self.engine, self.plan = open_engine(checkpoint, options, progress)
        self.context = self.plan.settings.context
        self.vocab_size = self.engine.vocab

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation that the model is to continue."""
        if self.template is None:
            raise ModelError(
                f"{self.name} has no chat template.",
                hint="Give a plain prompt: run --raw, generate(), or /v1/completions.",
            )
        return self.tokenizer.encode(self.template.render(messages, tools=tools, **variables))

    def request(self, prompt: Sequence[int], params: SamplingParams) -> GenerationRequest:
        """Return a request of token ids for the engine, with an id of its own."""
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=params,
            stop_ids=self.tokenizer.stop_ids,
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue one prompt or several, worked on together, without a chat template."""
        running: deque[Pieces] = deque()
        done: list[Completion] = []
        try:
            for prompt in _prompt_list(prompts):
                # What the queue cannot hold waits here until the first of ours is done.
                if len(running) >= self.engine.capacity:
                    done.append(_collect(running.popleft()))
                running.append(self.stream(prompt, params))
            return done + [_collect(pieces) for pieces in running]
        finally:
            for pieces in running:
                pieces.close()  # where one failed, the others are of no use

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> Completion:
        """Answer a conversation."""
        return _collect(self.stream_chat(messages, params, **variables))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Pieces:
        """Continue a prompt; the work begins at once, and ends if the iterator is closed."""
        params = params or SamplingParams()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = self.request(ids, params)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.engine.submit(request, events.put)
        pieces = self._pieces(request, events)
        next(pieces)  # into its `try`, so that closing it cancels even before the first token
        return pieces

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **variables: Any
    ) -> Pieces:
        """Answer a conversation piece by piece."""
        return self.stream(self.encode_chat(messages, **variables), params)

    def close(self) -> None:
        """End all requests and the engine's thread."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pieces(
        self, request: GenerationRequest, events: "queue.SimpleQueue[TokenEvent]"
    ) -> Pieces:
        try:
            answer = AnswerText(self.tokenizer, request.params.stop)
            yield Piece(text="")  # taken by `stream`
            while True:
                event = events.get()
                if event.finish_reason == "error":
                    raise HeadroomError(f"The engine failed: {event.error}.")
                piece = _piece(event, answer)
                if answer.stopped and event.finish_reason is None and self.engine.tells_experts:
                    self.engine.cancel(request.id)
                    piece = replace(piece, timings=_with_cost(piece.timings, events))
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self.engine.cancel(request.id)


def _piece(event: TokenEvent, answer: AnswerText) -> Piece:
    text = "" if event.token is None else answer.push(event.token)
    reason: FinishReason | None = "stop" if answer.stopped else event.finish_reason
    if reason is not None:
        text += answer.finish()
    return Piece(
        text=text,
        token=event.token,
        logprobs=event.logprobs,
        finish_reason=reason,
        prompt_tokens=event.prompt_tokens,
        generated_tokens=event.generated_tokens,
        timings=event.timings,
    )


def _with_cost(timings: Timings | None, events: "queue.SimpleQueue[TokenEvent]") -> Timings | None:
    """Return times up to a stop text with what the engine tells of experts when it ends, too."""
    while (event := events.get()).finish_reason is None:
        pass
    if timings is None or event.timings is None:
        return timings
    return replace(timings, experts=event.timings.experts)


def _collect(pieces: Pieces) -> Completion:
    parts = list(pieces)
    last = parts[-1]
    assert last.finish_reason is not None
    assert last.timings is not None
    return Completion(
        text="".join(piece.text for piece in parts),
        token_ids=tuple(piece.token for piece in parts if piece.token is not None),
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        generated_tokens=last.generated_tokens,
        logprobs=tuple(piece.logprobs for piece in parts if piece.logprobs is not None),
        timings=last.timings,
    )


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [tuple(entry for entry in prompts if isinstance(entry, int))]
    return [entry for entry in prompts if not isinstance(entry, int)]


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(checkpoint.chat_template, tokenizer.bos_token, tokenizer.eos_token)


def model_name(model: str, path: Path) -> str:
    """Return the short name of a model, as the server lists it: a known one, or the file's."""
    known = ALIASES.get(model.lower(), model.lower())
    if known in KNOWN_MODELS:
        return known
    return (path.stem if path.is_file() else path.name).lower()
