"""The whole path from a checkpoint to an engine, and the Python API.

Read `open_engine` first: each of its lines is one package of the project.
"""

import logging
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from headroom.answers import AnswerDelta, AnswerReader, Completion, join_deltas
from headroom.engine.engine import Engine
from headroom.engine.pooling import Vector, check_dimensions, shaped
from headroom.engine.prefix_disk import open_prefix_files
from headroom.engine.request import (
    GenerationRequest,
    SamplingParams,
    TokenConstraint,
    TokenEvent,
    new_seed,
    with_defaults,
)
from headroom.errors import HeadroomError, ModelError, OptionError, RequestError
from headroom.experts.traces.taps import RouterTap
from headroom.families.files import find_weights, open_checkpoint
from headroom.formats.aliases import with_aliases
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.hub import KNOWN_MODELS, SHORT_NAMES
from headroom.formats.pooling import find_pooling
from headroom.formats.sampling import SamplingDefaults
from headroom.machine.devices import torch_name
from headroom.options import Options, load_options, warn_unknown_variables
from headroom.plan.describe import ModelDescription, describe
from headroom.plan.drafts import DraftDescription, describe_draft
from headroom.plan.plan import Plan
from headroom.plan.settings import FeatureRequest
from headroom.plan.shape import ModelShape
from headroom.progress import LoadProgress, ignore_progress
from headroom.spec.drafter import Drafter, check_draft, open_drafter
from headroom.split.choice import NOTHING_LOADED, make_run_plan, make_worker_plan
from headroom.split.expert_records import read_records
from headroom.split.launch import start_pipeline
from headroom.split.memory_check import limit_memory
from headroom.split.pipeline import Pipeline
from headroom.split.placing import find_placement, placed_plan
from headroom.split.upkeep import open_upkeep
from headroom.split.workers import end_on_error, open_worker_pipeline, start_workers
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
from headroom.text.long_texts import check_not_far_beyond
from headroom.text.reasoning import Reasoning
from headroom.text.thought_budget import resolve_effort
from headroom.text.tool_formats import ToolFormat
from headroom.text.tool_memory import ToolMemory
from headroom.units import gib

log = logging.getLogger(__name__)

PromptInput = str | Sequence[int]  # text, or token ids
ChatMessage = Mapping[str, Any]  # {"role": ..., "content": ...}
SETTINGS = frozenset(setting.name for setting in fields(SamplingParams))
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
SEED_BITS = 53  # of a random seed: JavaScript's numbers hold that many exactly
AnswerStream = Generator["AnswerDelta", None, None]  # `close()` ends the answer early


def open_engine(
    model: ModelDescription,  # what `describe` read of a checkpoint: family, settings, sizes
    options: Options,
    progress: LoadProgress = ignore_progress,
    *,
    measuring: bool = False,  # a benchmark: routing statistics are not saved, experts stay in place
    memory_left: Mapping[str, int] = NOTHING_LOADED,  # bytes by device, beside other loaded models
    tap: RouterTap | None = None,  # records or replaces the picks of all routers
    features: FeatureRequest | None = None,  # layers whose output rows are kept of every step
    drafter: Drafter | None = None,  # guesses tokens in place of the one that --draft names
) -> "OpenedModel":
    """Plan and load a described checkpoint, and return it with an engine that takes requests."""
    started = time.perf_counter()
    if tap is not None and options.workers is not None:
        raise OptionError(
            "Worker processes do not record or replace the picks of routers.",
            hint="Leave out --workers (or HEADROOM_WORKERS).",
            param="workers",
        )
    check_draft(options)
    if tap is not None and options.drafts:
        raise OptionError(
            "The picks of routers are not recorded or replaced while tokens are guessed.",
            hint="Leave out --draft.",
            param="draft",
        )
    if tap is not None and options.draft is None:
        options = replace(options, draft="none")
    draft = open_draft(options, model.shape)  # the model that guesses tokens ahead; None: none does
    records = read_records(  # which experts earlier runs chose
        model.checkpoint, model.shape, options, measuring=measuring
    )
    # Processes that run the layers; None: this one does.
    workers = start_workers(options, len(model.shape.layers), progress)
    with end_on_error(workers):
        if workers is None:
            # where every byte goes
            plan = make_run_plan(
                *(model.shape, options, memory_left),
                features=features,
                draft=None if draft is None else draft.shape,
            )
        else:
            plan = make_worker_plan(model.shape, workers.devices, options, features)
        _log_plan(plan)
        placement = find_placement(  # which routed experts are hot
            model.shape, plan, options, model.checkpoint.identity, records.file.counts
        )
        plan = placed_plan(plan, placement)
        planning_s = time.perf_counter() - started
        if workers is None:
            limit_memory(plan, options.device_memory)
            pipeline = start_pipeline(  # weights on devices
                plan, model, progress, placement, tap, draft
            )
        else:
            pipeline = open_worker_pipeline(workers, plan, model, options, progress, placement)
        upkeep = open_upkeep(pipeline, records)  # exchanges experts between steps
        identity = model.checkpoint.identity
        if draft is not None:  # caches hold its keys and values, too
            identity += f" {draft.checkpoint.identity} {options.feature_dtype}"
        files = open_prefix_files(identity, plan, pipeline, options)
        chosen = plan.problem.options  # with the drafter of a file that has one
        drafter = drafter or open_drafter(chosen, pipeline)  # guesses tokens ahead
        if drafter is not None:
            most = plan.settings.draft_tokens
            log.info("draft: %s guesses up to %d tokens at a time", drafter.name, most)
        engine = Engine(
            *(pipeline, plan.settings, options.queue, upkeep, files, drafter),
            draft_always=options.draft_always,
        )
    return OpenedModel(engine, pipeline, plan, model.shape, planning_s, tap)


def open_draft(options: Options, target: ModelShape) -> DraftDescription | None:
    """Return the draft model that the options name; None: they name none."""
    if options.draft_model is None:
        return None
    return describe_draft(
        open_checkpoint(find_weights(options.draft_model, options.home_path)), target
    )


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A loaded model: its engine, and what the engine was made from."""

    engine: Engine
    pipeline: Pipeline
    plan: Plan
    shape: ModelShape
    planning_s: float  # seconds before the first weight was loaded
    tap: RouterTap | None = None  # what records or replaces the picks of all routers

    @property
    def device(self) -> str:
        """The device that runs the model, as a plan names it: "cpu", "cuda:0" or "hip:0".

        If several devices share the layers, this is the first GPU, or the first device.
        """
        devices = self.plan.devices
        gpu = next((device for device in devices if device.kind != "cpu"), devices[0])
        return gpu.name

    @property
    def torch_device(self) -> str:
        """The device that runs the model, as torch names it: "cpu" or "cuda:0".

        A GPU of a worker has no name here.
        """
        if self.in_workers:
            return "cpu"
        return torch_name(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether steps run on a GPU of this process, asynchronously to the host."""
        return not (self.in_workers or self.pipeline.on_cpu)

    @property
    def in_workers(self) -> bool:
        """Whether other processes run the layers."""
        return self.plan.problem.options.workers is not None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation, and how its answers are limited and parsed."""

    tokens: tuple[int, ...]
    reasoning: Reasoning | None  # None: the model writes no thoughts
    in_thought: bool  # the prompt ends inside a thought
    tools: tuple[Tool, ...] = ()  # the tools that the answer may call
    tool_format: ToolFormat | None = None  # how the model writes calls
    limits: AnswerLimits | None = None  # None: any token may come
    continues: bool = False  # the prompt ends with the beginning of the answer's text
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
        """Return the limits of one answer of at most `max_tokens`; None if any token may come."""
        return None if self.limits is None else self.limits.begin(max_tokens)


class LLM:
    """A loaded model; keyword settings are the fields of `Options`."""

    def __init__(
        self,
        model: str = "",
        *,
        options: Options | None = None,
        path: Path | None = None,  # where the model is, if the caller has found it already
        progress: LoadProgress = ignore_progress,
        memory_left: Mapping[str, int] = NOTHING_LOADED,  # bytes by device, beside loaded models
        tap: RouterTap | None = None,  # records or replaces the picks of all routers
        drafter: Drafter | None = None,  # guesses tokens in place of the one that --draft names
        **settings: object,
    ) -> None:
        if options is None:
            options = with_aliases(load_options({**settings, "model": model or None}))
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
        self.fill_in = find_fill_in(checkpoint, self.tokenizer)  # None: cannot fill in the middle
        self.pooling = find_pooling(checkpoint)
        self.tool_memory = ToolMemory()
        self._renderer: ChatRenderer | None = None  # None: the model has no chat template
        if self.template is not None:
            self._renderer = ChatRenderer(
                self.template, self.tokenizer, self.tool_format, self.reasoning, self.tool_memory
            )
        described = describe(checkpoint)  # headers only; no weight is read
        opened = open_engine(
            described, options, progress, memory_left=memory_left, tap=tap, drafter=drafter
        )
        self.engine, self.plan = opened.engine, opened.plan
        self.context = self.plan.settings.context
        self.vocab_size = self.engine.vocab
        try:
            self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size)
        except BaseException:
            self.engine.close()
            raise
        self.hidden_size = opened.shape.hidden  # values of an embedding vector

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """The model's own sampling settings, for what a caller leaves out of SamplingParams."""
        return self.sampling_defaults.settings

    def sampling(self, **settings: Any) -> SamplingParams:
        """Return `settings` as sampling parameters, with the model's defaults for the others."""
        given = {"seed": new_seed(SEED_BITS), **settings}
        return SamplingParams(**with_defaults(self.default_sampling, given))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the prompt of a conversation as token ids; the answer follows it."""
        return list(self.prepare_chat(Conversation(messages=messages)).tokens)

    def prepare_chat(self, chat: Conversation, *, must_fit: bool = False) -> ChatPrompt:
        """Return the prompt of a conversation, with the limits and the parser of its answers.

        With `must_fit`, a prompt far beyond the context raises ContextLengthError before all of it
        is encoded, which saves much memory.
        """
        if self._renderer is None:
            raise ModelError(
                f"{self.name} has no chat template.",
                hint="Give a plain prompt: run --raw, generate(), or /v1/completions.",
            )
        variables = dict(chat.template_variables)
        chat = replace(chat, thinking=resolve_effort(chat.thinking))
        if chat.thinking.enabled is not None:
            variables["enable_thinking"] = chat.thinking.enabled
        tools = () if chat.tool_choice.mode == "none" else chat.tools
        rendered = self._renderer.render(
            chat.messages, tools=tools, continues=chat.continues, variables=variables
        )
        opened = self.reasoning is not None and self.reasoning.is_open(rendered.text)
        if chat.continues and not opened:  # the text has begun, so no thought can follow
            chat = replace(chat, thinking=Thinking(enabled=False))
        if must_fit:
            check_not_far_beyond(self.tokenizer, rendered.text, self.context)
        tokens = tuple(rendered.encode(self.tokenizer))
        limits = AnswerLimits.of(
            self.grammars,
            chat,
            self.reasoning,
            self.tool_format,
            prompt=rendered.text,
            room=self.context - len(tokens),
        )
        tool_format = self.tool_format
        if chat.output_format is not None and tool_format is not None and not tool_format.native:
            # An answer in the format may look like a call.
            tool_format = replace(tool_format, begins_bare=False)
        return ChatPrompt(
            tokens=tokens,
            reasoning=self.reasoning,
            in_thought=opened,
            tools=tools,
            tool_format=tool_format,
            limits=limits,
            continues=chat.continues,
            keep=self.tool_memory.keeper(rendered.text),
        )

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
    ) -> GenerationRequest:
        """Return an engine request with a new id for a prompt of token ids."""
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=params,
            stop_ids=self.tokenizer.stop_ids,
            constraint=constraint,
        )

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        *,
        output_format: OutputFormat | None = None,
        schema: Mapping[str, Any] | None = None,
        suffix: str = "",
    ) -> list[Completion]:
        """Continue one or several prompts, without a chat template; several run together.

        All answers use one seed but different draws, so that answers to equal prompts differ.
        Without `params` the model's own sampling settings hold. With `schema` an answer is JSON
        that matches the schema; with `output_format` it matches that format. With `suffix` an
        answer is the text between its prompt and the suffix.

        If a prompt and `params.max_tokens` do not fit the context, the answer ends where the
        context ends, with finish reason "length", and a log line says so. A prompt that leaves no
        room for an answer raises ContextLengthError.
        """
        params = params or self.sampling()
        output_format = _format_of(output_format, schema)
        running: deque[AnswerStream] = deque()
        done: list[Completion] = []
        try:
            for draw, prompt in enumerate(_prompt_list(prompts)):
                # The engine's queue is full: wait until our oldest prompt is answered.
                if len(running) >= self.engine.capacity:
                    done.append(join_deltas(list(running.popleft())))
                own = replace(params, draw=params.draw + draw)
                running.append(self.stream(prompt, own, output_format=output_format, suffix=suffix))
            return done + [join_deltas(list(deltas)) for deltas in running]
        finally:
            for deltas in running:
                deltas.close()  # ends the other answers after an error in one

    def chat(
        self,
        messages: Conversation | Sequence[ChatMessage],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        tool_choice: ToolChoice | ChoiceMode = "auto",
        output_format: OutputFormat | None = None,
        schema: Mapping[str, Any] | None = None,
        thinking: Thinking | bool | None = None,
        template_variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> Completion:
        """Answer a conversation; `stream_chat` describes the arguments."""
        deltas = self.stream_chat(
            messages,
            params,
            tools=tools,
            tool_choice=tool_choice,
            output_format=output_format,
            schema=schema,
            thinking=thinking,
            template_variables=template_variables,
        )
        return join_deltas(list(deltas))

    def stream(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        output_format: OutputFormat | None = None,
        schema: Mapping[str, Any] | None = None,
        suffix: str = "",
    ) -> AnswerStream:
        """Continue a prompt, delta by delta; closing the iterator ends the answer early.

        The engine begins at once. Lengths and the other arguments are as with `generate`.
        """
        output_format = _format_of(output_format, schema)
        constraint = None
        if output_format is not None:
            constraint = self.grammars.compile([output_format], continues=True).begin()
        stops = self.tokenizer.stop_ids
        if suffix:
            if self.fill_in is None:
                raise RequestError(
                    f"{self.name} has no tokens for filling in the middle.",
                    hint="Leave out `suffix`, or use a model for code that has such tokens.",
                    param="suffix",
                )
            ids: Sequence[int] = self.fill_in.prompt(self.tokenizer, prompt, suffix)
            stops |= self.fill_in.stop_ids
        else:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = self.request(ids, params or self.sampling(), constraint)
        return self._start(replace(request, stop_ids=stops), None)

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
        template_variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> AnswerStream:
        """Answer a conversation, delta by delta; its length is limited as with `generate`.

        `tools` are `Tool`s, or objects as in OpenAI's API. With `schema` the answer's text is JSON
        that matches the schema; with `output_format` it matches that format. `thinking` turns
        thoughts on or off, or limits them. `template_variables` go to the chat template. If
        `messages` is a `Conversation`, all of this stands in it, and these arguments are ignored.
        """
        if not isinstance(messages, Conversation):
            for name in sorted(SETTINGS & template_variables.keys()):
                raise RequestError(
                    f"{name} is a sampling setting, not a variable of a chat template.",
                    hint=f"Give it as SamplingParams({name}=...).",
                    param=name,
                )
            if not isinstance(tool_choice, ToolChoice):
                tool_choice = ToolChoice(mode=tool_choice)
            if not isinstance(thinking, Thinking):
                thinking = Thinking(enabled=thinking)
            messages = Conversation(
                messages=messages,
                tools=tuple(as_tool(tool) for tool in tools),
                tool_choice=tool_choice,
                output_format=_format_of(output_format, schema),
                thinking=thinking,
                template_variables=template_variables,
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
        # Enter the generator's `try`: from now on `close()` cancels the request.
        next(deltas)
        return deltas

    def embedding_request(self, text: PromptInput) -> GenerationRequest:
        """Return the engine request for the embedding vector of a text."""
        if self.pooling not in ("mean", "last"):
            raise ModelError(
                f"The files of {self.name} ask for pooling of the kind {self.pooling!r}.",
                hint="headroom supports mean pooling and last-token pooling.",
            )
        ids = self.tokenizer.encode_whole(text) if isinstance(text, str) else text
        return replace(self.request(ids, SamplingParams()), pooling=self.pooling)

    def embed(
        self, texts: PromptInput | Sequence[PromptInput], dimensions: int | None = None
    ) -> list[Vector]:
        """Return an embedding vector of length 1 for each text; several texts run together.

        With `dimensions`, vectors are cut to their first values and scaled to length 1 again.
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
                    raise _engine_error(event.error or event.finish_reason)
                vectors[event.request_id] = shaped(event.vector, dimensions)
        finally:
            for request_id in running:
                self.engine.cancel(request_id)
        return [vectors[request_id] for request_id in order]

    def close(self) -> None:
        """Cancel all requests and stop the engine's thread."""
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
            yield AnswerDelta()  # `_start` takes it
            while True:
                delta = reader.read(events.get())
                if delta.finish_reason == "error":
                    raise _engine_error(delta.error)
                if not delta.is_empty:
                    yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.engine.cancel(request.id)


def _format_of(
    output_format: OutputFormat | None, schema: Mapping[str, Any] | None
) -> OutputFormat | None:
    """Return the format of an answer; a schema stands for JSON that matches the schema."""
    return output_format if schema is None else OutputFormat(kind="json_schema", value=schema)


def model_name(model: str, path: Path) -> str:
    """Return the short name of a model: a known model's own, or the name of its file or folder."""
    known = SHORT_NAMES.get(model.lower(), model.lower())
    if known in KNOWN_MODELS:
        return known
    return (path.stem if path.is_file() else path.name).lower()


def _engine_error(reason: str | None) -> HeadroomError:
    return HeadroomError(f"The engine failed: {(reason or 'unknown').rstrip('.')}.")


def _prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [tuple(entry for entry in prompts if isinstance(entry, int))]
    return [entry for entry in prompts if not isinstance(entry, int)]


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """Return the sampling settings of the model's files; refuse those out of range."""
    try:
        SamplingParams(**checkpoint.sampling.settings)  # type: ignore[arg-type]
    except RequestError as error:
        raise ModelError(
            f"{checkpoint.path}: {error.message}",
            hint=f"Correct it in {checkpoint.sampling.source}.",
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
