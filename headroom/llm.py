"""The whole path from a checkpoint to an engine, and the Python API.

Read `open_engine` first: each of its lines is one package of the project.
"""

import logging
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from headroom.answers import AnswerDelta, AnswerReader, Completion, join_deltas
from headroom.engine.engine import Engine
from headroom.engine.pooling import Vector, check_dimensions, shaped
from headroom.engine.request import (
    GenerationRequest,
    SamplingParams,
    TokenConstraint,
    TokenEvent,
    new_seed,
)
from headroom.errors import HeadroomError, ModelError, RequestError
from headroom.families.files import find_weights, open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.hub import ALIASES, KNOWN_MODELS
from headroom.formats.pooling import find_pooling
from headroom.formats.sampling import SamplingDefaults, with_defaults
from headroom.machine.devices import torch_name
from headroom.options import Options, load_options, warn_unknown_variables
from headroom.plan.describe import ModelDescription, describe
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.choice import NOTHING_LOADED, make_run_plan
from headroom.split.expert_records import read_records
from headroom.split.launch import LoadProgress, start_pipeline
from headroom.split.memory_check import limit_memory
from headroom.split.pipeline import Pipeline
from headroom.split.placing import find_placement, placed_plan
from headroom.split.upkeep import open_upkeep
from headroom.text.abilities import Abilities
from headroom.text.answer_limits import AnswerLimits
from headroom.text.answer_parser import AnswerParser, WrittenAnswer
from headroom.text.chat_renderer import ChatRenderer
from headroom.text.conversation import (
    ChoiceMode,
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
    as_tool,
)
from headroom.text.fill_in import find_fill_in
from headroom.text.grammar import GrammarCompiler
from headroom.text.reasoning import Reasoning
from headroom.text.thought_budget import resolve_effort
from headroom.text.tool_formats import ToolFormat
from headroom.text.tool_memory import ToolMemory
from headroom.units import gib

log = logging.getLogger(__name__)

PromptInput = str | Sequence[int]  # text, or token ids
ChatMessage = Mapping[str, Any]  # {"role": ..., "content": ...}
SEED_BITS = 53  # of a drawn seed; JavaScript's numbers hold as many exactly
AnswerStream = Generator["AnswerDelta", None, None]  # `close()` ends the answer early


def open_engine(
    model: ModelDescription,  # what `describe` read of a checkpoint: family, settings, sizes
    options: Options,
    progress: LoadProgress = lambda done, total: None,
    *,
    measuring: bool = False,  # a benchmark: routing statistics are not saved, experts stay in place
    memory_left: Mapping[str, int] = NOTHING_LOADED,  # bytes by device, beside other loaded models
) -> "OpenedModel":
    """Go the whole path from a described checkpoint to an engine that takes requests."""
    started = time.perf_counter()
    records = read_records(model, options, measuring=measuring)  # which experts earlier runs chose
    plan = make_run_plan(model.shape, options, memory_left)  # where every byte goes
    _log_plan(plan)
    placement = find_placement(  # which routed experts are hot
        model.shape, plan, options, model.checkpoint.identity, records.file.counts
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
class ChatPrompt:
    """A conversation that is ready for the engine, and how its answers are limited and read."""

    tokens: tuple[int, ...]
    reasoning: Reasoning | None  # None: the model writes no thoughts
    in_thought: bool  # the prompt ends inside a thought
    tools: tuple[Tool, ...] = ()  # that the answer may call
    tool_format: ToolFormat | None = None  # how the model writes calls
    limits: AnswerLimits | None = None  # None: nothing is limited
    continues: bool = False  # the prompt ends with the first words of the answer's text
    keep: Callable[[WrittenAnswer], None] | None = None  # remembers an answer that has calls

    def new_parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(
            self.reasoning,
            in_thought=self.in_thought,
            begun=self.continues and not self.in_thought,
            tools=self.tools,
            format=self.tool_format,
            keep=self.keep if self.tools else None,
        )

    def new_constraint(self, max_tokens: int | None = None) -> TokenConstraint | None:
        """Return the limits of one answer of at most so many tokens; None if any token may come."""
        return None if self.limits is None else self.limits.begin(max_tokens)


class LLM:
    """A model ready to answer; keyword settings have the names of the fields of `Options`."""

    def __init__(
        self,
        model: str = "",
        *,
        options: Options | None = None,
        path: Path | None = None,  # where the model is, if the caller has found it already
        progress: LoadProgress = lambda done, total: None,
        memory_left: Mapping[str, int] = NOTHING_LOADED,  # bytes by device, beside loaded models
        **settings: object,
    ) -> None:
        if options is None:
            options = load_options({**settings, "model": model or None})
            warn_unknown_variables()
        path = path or find_weights(options.model, options.home_path)
        checkpoint = open_checkpoint(path)
        self.options = options
        self.name = options.served_name or model_name(options.model, path)
        self.path = checkpoint.path
        self.abilities = Abilities.of(checkpoint)
        self.tokenizer, self.template = self.abilities.tokenizer, self.abilities.template
        self.reasoning, self.tool_format = self.abilities.reasoning, self.abilities.tool_format
        self.sampling_defaults = _sampling_defaults(checkpoint)
        self.fill_in = find_fill_in(checkpoint, self.tokenizer)  # None: the model fills no gaps
        self.tool_memory = ToolMemory()
        self._chats: ChatRenderer | None = None  # None: the model has no chat template
        if self.template is not None:
            self._chats = ChatRenderer(
                self.template, self.tokenizer, self.tool_format, self.reasoning, self.tool_memory
            )
        described = describe(checkpoint)  # headers only; no weight is read
        opened = open_engine(described, options, progress, memory_left=memory_left)
        self.engine, self.plan = opened.engine, opened.plan
        self.context = self.plan.settings.context
        self.vocab_size = self.engine.vocab
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size)
        self.hidden_size = opened.shape.hidden  # values of a vector
        self.pooling = find_pooling(checkpoint)

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """The model's own sampling settings: fields of SamplingParams that a caller may omit."""
        return self.sampling_defaults.settings

    def sampling(self, **settings: Any) -> SamplingParams:
        """Return sampling settings; where `settings` say nothing, the model's own defaults."""
        given = {"seed": new_seed(SEED_BITS), **settings}
        return SamplingParams(**with_defaults(self.default_sampling, given))

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, with the chat template's start of an answer."""
        return self.tokenizer.encode(self._render(messages, tools=tools, **variables))

    def _render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        if self.template is None:
            raise self._no_template()
        return self.template.render(messages, tools=tools, **variables)

    def _no_template(self) -> ModelError:
        return ModelError(
            f"{self.name} has no chat template.",
            hint="Give a plain prompt: run --raw, generate(), or /v1/completions.",
        )

    def prepare_chat(self, chat: Conversation) -> ChatPrompt:
        """Return a conversation as token ids, with the limits and the parser of its answers."""
        variables = dict(chat.template_variables)
        chat = replace(chat, thinking=resolve_effort(chat.thinking))
        if chat.thinking.enabled is not None:
            variables["enable_thinking"] = chat.thinking.enabled
        tools = () if chat.tool_choice.mode == "none" else chat.tools
        if self._chats is None:
            raise self._no_template()
        rendered = self._chats.render(
            chat.messages, tools=tools, continues=chat.continues, variables=variables
        )
        opened = self.reasoning is not None and self.reasoning.is_open(rendered.text)
        if chat.continues and not opened:  # the text has begun, so no thought can follow
            chat = replace(chat, thinking=Thinking(enabled=False))
        tokens = tuple(rendered.encode(self.tokenizer))
        limits = AnswerLimits.of(
            self.grammars,
            chat,
            self.reasoning,
            self.tool_format,
            prompt=rendered.text,
            room=self.context - len(tokens),
        )
        return ChatPrompt(
            tokens,
            self.reasoning,
            opened,
            tools,
            self.tool_format,
            limits,
            chat.continues,
            self.tool_memory.keeper(rendered.text),
        )

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
    ) -> GenerationRequest:
        """Return a request of token ids for the engine, with a new id."""
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=params,
            stop_ids=self.tokenizer.stop_ids,
            constraint=constraint,
        )

    def generate(
        self, prompts: PromptInput | Sequence[PromptInput], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue one or several prompts, without a chat template; several run together.

        The prompts share a seed, and each has a draw of its own, so that answers to equal prompts
        differ. Without `params` the model's own sampling settings hold.

        `params.max_tokens` is not a promise: if prompt and answer would not fit the context, the
        answer ends where the context ends, with finish reason "length", and a log line says so. A
        prompt that leaves no room for an answer raises ContextLengthError.
        """
        params = params or self.sampling()
        running: deque[AnswerStream] = deque()
        done: list[Completion] = []
        try:
            for draw, prompt in enumerate(_prompt_list(prompts)):
                # A prompt that the engine's queue cannot hold waits for the oldest of ours to end.
                if len(running) >= self.engine.capacity:
                    done.append(join_deltas(list(running.popleft())))
                running.append(self.stream(prompt, replace(params, draw=params.draw + draw)))
            return done + [join_deltas(list(deltas)) for deltas in running]
        finally:
            for deltas in running:
                deltas.close()  # after an error in one answer the others are not read

    def chat(
        self,
        messages: Conversation | Sequence[ChatMessage],
        params: SamplingParams | None = None,
        **more: Any,
    ) -> Completion:
        """Answer a conversation; `stream_chat` says what may be given besides the messages."""
        return join_deltas(list(self.stream_chat(messages, params, **more)))

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AnswerStream:
        """Continue a prompt; the engine begins at once and stops if the iterator is closed.

        If prompt and `params.max_tokens` do not fit the context, the answer ends where the context
        ends, as with `generate`.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self._start(self.request(ids, params or self.sampling()), None)

    def stream_chat(
        self,
        messages: Conversation | Sequence[ChatMessage],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        tool_choice: ToolChoice | ChoiceMode = "auto",
        output_format: OutputFormat | None = None,
        schema: Mapping[str, Any] | None = None,
        thinking: Thinking | bool | None = None,
        **variables: Any,
    ) -> AnswerStream:
        """Answer a conversation, delta by delta; its length is limited as with `generate`.

        `tools` are `Tool`s or OpenAI's objects; the answer's `tool_calls` name them. The answer's
        text is JSON that matches `schema`, or matches `output_format`. `thinking` turns thoughts on
        or off, or limits them. Further `variables` go to the chat template. A whole `Conversation`
        says all of this itself.
        """
        if not isinstance(messages, Conversation):
            if schema is not None:
                output_format = OutputFormat(kind="json_schema", value=schema)
            if not isinstance(tool_choice, ToolChoice):
                tool_choice = ToolChoice(mode=tool_choice)
            if not isinstance(thinking, Thinking):
                thinking = Thinking(enabled=thinking)
            messages = Conversation(
                messages=messages,
                tools=tuple(as_tool(tool) for tool in tools),
                tool_choice=tool_choice,
                output_format=output_format,
                thinking=thinking,
                template_variables=variables,
            )
        params = params or self.sampling()
        prompt = self.prepare_chat(messages)
        constraint = prompt.new_constraint(params.max_tokens)
        request = self.request(prompt.tokens, params, constraint)
        return self._start(request, prompt.new_parser())

    def _start(self, request: GenerationRequest, parser: AnswerParser | None) -> AnswerStream:
        """Hand a request to the engine and return its deltas."""
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.engine.submit(request, events.put)
        deltas = self._deltas(request, events, parser)
        next(deltas)  # enters its `try`, so that closing it cancels even before the first token
        return deltas

    def embedding_request(self, text: PromptInput) -> GenerationRequest:
        """Return the engine's request for the vector of a text."""
        if self.pooling not in ("mean", "last"):
            raise ModelError(
                f"The files of {self.name} ask for vectors of the kind {self.pooling!r}.",
                hint="Vectors can be the mean of all tokens' states, or the last token's.",
            )
        ids = self.tokenizer.encode_whole(text) if isinstance(text, str) else text
        return replace(self.request(ids, SamplingParams()), pooling=self.pooling)

    def embed(
        self, texts: PromptInput | Sequence[PromptInput], dimensions: int | None = None
    ) -> list[Vector]:
        """Return a vector of length 1 for each text, of which the engine runs several together.

        With `dimensions`, a vector has only its first values, scaled to length 1 again.
        """
        check_dimensions(dimensions, self.hidden_size)
        requests = deque(self.embedding_request(text) for text in _prompt_list(texts))
        order = [request.id for request in requests]
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        running: set[str] = set()
        vectors: dict[str, Vector] = {}
        try:
            while requests or running:
                while requests and len(running) < self.engine.capacity:
                    self.engine.submit(requests[0], events.put)
                    running.add(requests.popleft().id)
                event = events.get()
                running.discard(event.request_id)
                if event.vector is None:
                    raise HeadroomError(f"The engine failed: {event.error or event.finish_reason}.")
                vectors[event.request_id] = shaped(event.vector, dimensions)
        finally:
            for request_id in running:
                self.engine.cancel(request_id)
        return [vectors[request_id] for request_id in order]

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
        self,
        request: GenerationRequest,
        events: "queue.SimpleQueue[TokenEvent]",
        parser: AnswerParser | None,
    ) -> AnswerStream:
        try:
            reader = AnswerReader(request, self.tokenizer, self.engine, parser=parser)
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


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """Return the sampling settings that the model's files recommend, or refuse wrong ones."""
    try:
        SamplingParams(**checkpoint.sampling.settings)  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelError(
            f"{checkpoint.path}: {error.message}",
            hint=f"It stands in {checkpoint.sampling.source}.",
        ) from error
    return checkpoint.sampling


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
