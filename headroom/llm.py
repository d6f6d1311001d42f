"""The whole path from a checkpoint to an engine, and the Python API.

Read `open_engine` first: each of its lines is one package of the project.
"""

import logging
import queue
import time
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
from headroom.families.files import find_weights, open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.hub import ALIASES, KNOWN_MODELS
from headroom.machine.devices import torch_name
from headroom.options import Options, load_options, warn_unknown_variables
from headroom.plan.describe import describe
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.choice import make_run_plan
from headroom.split.expert_records import read_records
from headroom.split.launch import Progress, start_pipeline
from headroom.split.memory_check import limit_memory
from headroom.split.pipeline import Pipeline
from headroom.split.placing import find_placement, placed_plan
from headroom.split.upkeep import open_upkeep
from headroom.text.answer import AnswerText
from headroom.text.chat_template import ChatTemplate
from headroom.text.reasoning import find_reasoning
from headroom.text.tokenizer import Tokenizer
from headroom.units import gib

log = logging.getLogger(__name__)

PromptInput = str | Sequence[int]  # text, or token ids
ChatMessage = Mapping[str, Any]  # {"role": ..., "content": ...}
NO_TIME = Timings(queue_s=0.0, prefill_s=0.0, decode_s=0.0)
AnswerStream = Generator["AnswerDelta", None, None]  # `close()` ends the answer early


def open_engine(
    checkpoint: Checkpoint,
    options: Options,
    progress: Progress = lambda done, total: None,
    *,
    measuring: bool = False,  # a benchmark: routing statistics are not saved, experts stay in place
) -> "OpenedModel":
    """Go the whole path from a checkpoint to an engine that takes requests."""
    started = time.perf_counter()
    model = describe(checkpoint)  # headers only: family, settings, sizes
    records = read_records(model, options, measuring=measuring)  # which experts earlier runs chose
    plan = make_run_plan(model.shape, options)  # where every byte goes
    _log_plan(plan)
    placement = find_placement(  # which routed experts are hot
        model.shape, plan, options, checkpoint.identity, records.file.counts
    )
    plan = placed_plan(plan, placement)
    limit_memory(plan, options.device_memory)
    planning_s = time.perf_counter() - started
    pipeline = start_pipeline(plan, model, progress, placement)  # weights on devices
    upkeep = open_upkeep(pipeline, records)  # exchanges experts between steps
    engine = Engine(pipeline, plan.settings, options.queue, upkeep)  # requests in, tokens out
    return OpenedModel(engine, pipeline, plan, model.shape, planning_s)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A loaded model: its engine, and what the engine was made from."""

    engine: Engine
    pipeline: Pipeline
    plan: Plan
    shape: ModelShape
    planning_s: float  # seconds before the first weight was loaded

    @property
    def device(self) -> str:
        """The device that runs the model, as a plan names it: "cpu", "cuda:0" or "hip:0"."""
        return self.plan.devices[0].name

    @property
    def torch_device(self) -> str:
        """The device that runs the model, as torch names it: "cpu" or "cuda:0"."""
        return torch_name(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether the model's steps run on a GPU, asynchronously to the host."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of an answer and its place in the answer's text."""

    id: int
    offset: int  # characters of the answer before this token
    logprobs: TokenLogprobs | None  # None if not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What one token event adds to an answer; the last delta has a finish reason."""

    index: int = 0  # which answer, if several are read together
    text: str = ""  # empty for half a character, or for what may be the start of a stop text
    token: int | None = None  # the event's token, also if its text is hidden or held back
    logprobs: TokenLogprobs | None = None  # of `token`, if asked for
    shown_tokens: tuple[AnswerToken, ...] = ()  # tokens whose text has been given out by now
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first delta, if asked for
    finish_reason: FinishReason | None = None
    error: str = ""  # with finish reason "error"
    prompt_tokens: int = 0
    generated_tokens: int = 0  # so far
    timings: Timings = NO_TIME  # up to this delta

    @property
    def is_empty(self) -> bool:
        """Whether the delta adds nothing that a reader could see."""
        return self.token is None and self.finish_reason is None and not self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]  # with the token that ended the answer, if one did
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    logprobs: tuple[TokenLogprobs, ...]  # one per token id, if asked for
    shown_tokens: tuple[AnswerToken, ...]  # the tokens that `text` shows
    prompt_logprobs: tuple[TokenLogprobs | None, ...]  # one per prompt token, if asked for
    timings: Timings


class AnswerReader:
    """Turns the token events of one request into text.

    The reader hides the token that ends an answer. It also looks for stop texts, which the engine
    does not know: at the first one the answer ends, and the reader cancels the request.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, engine: Engine, index: int = 0
    ) -> None:
        self._request_id = request.id
        self._engine = engine
        self._index = index
        self._text = AnswerText(tokenizer, request.params.stop)
        self._held: list[AnswerToken] = []  # tokens whose text is not given out yet
        # The last delta of an answer that a stop text ended, until the engine reports its experts.
        self._last: AnswerDelta | None = None

    def read(self, event: TokenEvent) -> AnswerDelta:
        """Return what an event adds to the answer; nothing follows a delta with a finish reason."""
        if self._last is not None:
            return self._end_with_experts(self._last, event)
        delta = self._add(event)
        if delta.finish_reason is None or event.finish_reason is not None:
            return delta
        self._engine.cancel(self._request_id)
        if not self._engine.tells_experts:
            return delta
        self._last = AnswerDelta(
            index=self._index,
            finish_reason=delta.finish_reason,
            prompt_tokens=delta.prompt_tokens,
            generated_tokens=delta.generated_tokens,
            timings=delta.timings,
        )
        return replace(delta, finish_reason=None)

    def _add(self, event: TokenEvent) -> AnswerDelta:
        text = ""
        # The token that ends an answer is no part of its text, control token or not.
        if event.token is not None and event.finish_reason != "stop":
            self._held.append(AnswerToken(event.token, self._text.decoded, event.logprobs))
            text = self._text.push(event.token)
        if event.finish_reason is not None:
            text += self._text.finish()
        reason: FinishReason | None = "stop" if self._text.stopped else event.finish_reason
        return AnswerDelta(
            index=self._index,
            text=text,
            token=event.token,
            logprobs=event.logprobs,
            shown_tokens=self._release(all_held=reason is not None and not self._text.stopped),
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=reason,
            error=event.error,
            prompt_tokens=event.prompt_tokens,
            generated_tokens=event.generated_tokens,
            timings=event.timings or NO_TIME,
        )

    def _release(self, *, all_held: bool) -> tuple[AnswerToken, ...]:
        """Return the held tokens whose text has been given out, and hold them no longer."""
        ready = 0
        while ready < len(self._held) and (all_held or self._held[ready].offset < self._text.shown):
            ready += 1
        released, self._held = self._held[:ready], self._held[ready:]
        return tuple(released)

    def _end_with_experts(self, last: AnswerDelta, event: TokenEvent) -> AnswerDelta:
        """Return the answer's last delta once the engine's last event reports the experts' cost."""
        if event.finish_reason is None:
            return AnswerDelta(index=self._index)
        experts = event.timings.experts if event.timings is not None else None
        return replace(last, timings=replace(last.timings, experts=experts))


def join_deltas(deltas: Sequence[AnswerDelta]) -> Completion:
    """Return the whole answer that the deltas of one request add up to."""
    last = deltas[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(delta.token for delta in deltas if delta.token is not None),
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        generated_tokens=last.generated_tokens,
        logprobs=tuple(delta.logprobs for delta in deltas if delta.logprobs is not None),
        shown_tokens=tuple(token for delta in deltas for token in delta.shown_tokens),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        timings=last.timings,
    )


class LLM:
    """A model ready to answer; keyword settings have the names of the fields of `Options`."""

    def __init__(
        self,
        model: str = "",
        *,
        options: Options | None = None,
        path: Path | None = None,  # where the model is, if the caller has found it already
        progress: Progress = lambda done, total: None,  # called with bytes loaded and bytes in all
        **settings: object,
    ) -> None:
        if options is None:
            options = load_options({**settings, "model": model or None})
            warn_unknown_variables()
        path = path or find_weights(options.model, options.home_path)
        checkpoint = open_checkpoint(path)
        self.options = options
        self.name = options.served_name or model_name(options.model, path)
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        self.template = _template(checkpoint, self.tokenizer)
        self.reasoning = find_reasoning(self.tokenizer, self.template)
        opened = open_engine(checkpoint, options, progress)
        self.engine, self.plan = opened.engine, opened.plan
        self.context = self.plan.settings.context
        self.vocab_size = self.engine.vocab

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, with the chat template's start of an answer."""
        if self.template is None:
            raise ModelError(
                f"{self.name} has no chat template.",
                hint="Give a plain prompt: run --raw, generate(), or /v1/completions.",
            )
        return self.tokenizer.encode(self.template.render(messages, tools=tools, **variables))

    def request(self, prompt: Sequence[int], params: SamplingParams) -> GenerationRequest:
        """Return a request of token ids for the engine, with a new id."""
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=params,
            stop_ids=self.tokenizer.stop_ids,
        )

    def generate(
        self, prompts: PromptInput | Sequence[PromptInput], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue one or several prompts, without a chat template; several run together."""
        running: deque[AnswerStream] = deque()
        done: list[Completion] = []
        try:
            for prompt in _prompt_list(prompts):
                # A prompt that the engine's queue cannot hold waits for the oldest of ours to end.
                if len(running) >= self.engine.capacity:
                    done.append(join_deltas(list(running.popleft())))
                running.append(self.stream(prompt, params))
            return done + [join_deltas(list(deltas)) for deltas in running]
        finally:
            for deltas in running:
                deltas.close()  # after an error in one answer the others are not read

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> Completion:
        """Answer a conversation."""
        return join_deltas(list(self.stream_chat(messages, params, **variables)))

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AnswerStream:
        """Continue a prompt; the engine begins at once and stops if the iterator is closed."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = self.request(ids, params or SamplingParams())
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.engine.submit(request, events.put)
        deltas = self._deltas(request, events)
        next(deltas)  # enters its `try`, so that closing it cancels even before the first token
        return deltas

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **variables: Any,
    ) -> AnswerStream:
        """Answer a conversation, delta by delta."""
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

    def _deltas(
        self, request: GenerationRequest, events: "queue.SimpleQueue[TokenEvent]"
    ) -> AnswerStream:
        try:
            reader = AnswerReader(request, self.tokenizer, self.engine)
            yield AnswerDelta()  # taken by `stream`
            while True:
                delta = reader.read(events.get())
                if delta.finish_reason == "error":
                    raise HeadroomError(f"The engine failed: {delta.error}.")
                if not delta.is_empty:
                    yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.engine.cancel(request.id)


def model_name(model: str, path: Path) -> str:
    """Return the short name that the server lists: a known model's, or the name of the file."""
    known = ALIASES.get(model.lower(), model.lower())
    if known in KNOWN_MODELS:
        return known
    return (path.stem if path.is_file() else path.name).lower()


def _prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [tuple(entry for entry in prompts if isinstance(entry, int))]
    return [entry for entry in prompts if not isinstance(entry, int)]


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    if checkpoint.chat_template is None:
        return None
    return ChatTemplate(checkpoint.chat_template, tokenizer.bos_token, tokenizer.eos_token)


def _log_plan(plan: Plan) -> None:
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
