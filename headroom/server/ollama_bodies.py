"""The bodies of Ollama's API, and the conversations and settings that they stand for."""

import logging
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from headroom.engine.request import MAX_COUNT, MAX_LOGPROBS
from headroom.server.answer_fields import VECTOR_FIELDS
from headroom.server.invalid_bodies import short, wrong_type, wrong_value
from headroom.server.offered_tools import OfferedTools, read_choice
from headroom.server.openai_tools import ToolBody, ToolName, arguments_text
from headroom.server.schemas import (
    Body,
    CacheFields,
    CheckedBody,
    Number,
    check_stops,
    invalid,
    token_ids,
    unsupported,
)
from headroom.server.service import MAX_EMBEDDED_TEXTS, UNTIL_END
from headroom.server.shelf import NEVER
from headroom.server.thinking_fields import Think
from headroom.text.conversation import Conversation, OutputFormat, Thinking

log = logging.getLogger("headroom.server")

OLLAMA_ROLES = ("system", "user", "assistant", "tool")
UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")  # as Go writes durations
_DURATION = re.compile(rf"([+-]?)((?:{_STEP.pattern})+)")


def _whole(value: object) -> object:
    """Return a float such as 64.0 as an int: some clients keep all options as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-MAX_COUNT, le=MAX_COUNT)]


def seconds(value: object) -> float:
    """Return `keep_alive` in seconds: given as a number of seconds, or as text such as "1h30m".

    A negative value means for ever.
    """
    expected = 'a number of seconds or a text such as "5m"'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong_type(expected)
    if isinstance(value, str):
        text = value.strip()
        try:
            value = float(text)
        except ValueError:
            found = _DURATION.fullmatch(text)
            if found is None:
                raise wrong_type(expected) from None
            steps = _STEP.findall(found[2])
            value = sum(float(number) * UNIT_S[unit] for number, unit in steps)
            value = -value if found[1] == "-" else value
    if math.isnan(value):
        raise wrong_type(expected)
    return NEVER if value < 0 else float(value)


class OptionsBody(CheckedBody):
    """Sampling settings and limits of an answer; options of Ollama's loader are ignored."""

    prefix = "options."

    temperature: Number | None = None
    top_k: Whole | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Annotated[int, BeforeValidator(_whole)] | None = None
    num_predict: Whole | None = None
    num_ctx: Whole | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(check_stops)] = ()

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the options give, with headroom's names."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            # A negative seed asks for a random one.
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
            "stop": self.stop or None,
        }
        if self.num_predict is not None:
            given["max_tokens"] = self.num_predict if self.num_predict > 0 else UNTIL_END
        if self.repeat_last_n is not None and self.repeat_last_n != 0:
            given["penalty_window"] = max(0, self.repeat_last_n)  # Ollama's -1 is our 0: all tokens
        elif self.repeat_last_n == 0:  # in Ollama, no tokens: no penalties
            given |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {name: value for name, value in given.items() if value is not None}


def _check_images(value: object) -> None:
    if value not in (None, []):
        raise ValueError("pictures are not supported, only text")


def _check_format(value: object) -> OutputFormat | None:
    if value in (None, ""):
        return None
    if value == "json":
        return OutputFormat(kind="json_object")
    if not isinstance(value, dict):
        raise wrong_value('"json" or a JSON schema')
    return OutputFormat(kind="json_schema", value=value)


def _check_model(value: str) -> str:
    if not value.strip():
        raise ValueError("the name of a model is empty")
    return value


ModelName = Annotated[str, AfterValidator(_check_model)]
KeepAlive = Annotated[float, PlainValidator(seconds)]  # seconds
NoImages = Annotated[None, PlainValidator(_check_images)]


class ModelBody(Body):
    """A body that names a model; `name` is the older name of the field."""

    model: ModelName

    @model_validator(mode="before")
    @classmethod
    def _read_older_name(cls, body: Any) -> Any:
        if isinstance(body, dict) and not body.get("model") and body.get("name"):
            return {**body, "model": body["name"]}
        return body


class AnswerBody(CacheFields, ModelBody, CheckedBody):
    """The fields that /api/chat and /api/generate share."""

    stream: bool | None = None  # left out: true
    options: OptionsBody | None = None
    format: Annotated[OutputFormat | None, PlainValidator(_check_format)] = None
    think: Think = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is sent line by line."""
        return self.stream is not False

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the body gives, with headroom's names."""
        settings = (self.options or OptionsBody()).sampling()
        if self.logprobs:
            settings["logprobs"] = self.top_logprobs or 0
        return settings

    def thinking(self) -> Thinking:
        """Return whether the model thinks, and how much."""
        if isinstance(self.think, str):
            return Thinking(enabled=True, effort=self.think)
        return Thinking(enabled=self.think)

    def warn_of_context(self, context: int) -> None:
        """Log a warning if `num_ctx` is larger than the model's context."""
        wanted = (self.options or OptionsBody()).num_ctx
        if wanted is not None and wanted > context:
            log.warning(
                "ollama: num_ctx is %d, but the model was loaded with a context of %d tokens; "
                "start the server with a larger --context",
                wanted,
                context,
            )


class OllamaFunctionBody(Body):
    """The function and the arguments of a call that an assistant made earlier."""

    name: ToolName
    arguments: Annotated[str, BeforeValidator(arguments_text)] = "{}"  # JSON


class CallBody(Body):
    """A call that an assistant made earlier."""

    id: str | None = None
    function: OllamaFunctionBody


class OllamaMessageBody(Body):
    """One turn of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Annotated[list[CallBody], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # older name of `tool_name`

    @model_validator(mode="after")
    def _has_a_role(self) -> "OllamaMessageBody":
        if self.role not in OLLAMA_ROLES:
            raise ValueError(
                f"there is no role {short(self.role)!r}; a role is one of {', '.join(OLLAMA_ROLES)}"
            )
        return self


class OllamaChatBody(AnswerBody):
    """The body of /api/chat."""

    messages: Annotated[list[OllamaMessageBody], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None
    tool_choice: Any = None  # as in OpenAI's chats
    truncate: bool | None = None  # left out: true

    def conversation(self) -> Conversation:
        """Return the body as a `Conversation`."""
        offer = self._offered().choose(
            read_choice(self.tool_choice or None, nested=True), parallel=True
        )
        return Conversation(
            messages=read_messages(self.messages or []),
            tools=offer.tools,
            tool_choice=offer.choice,
            output_format=self.format,
            thinking=self.thinking(),
        )

    def _offered(self) -> OfferedTools:
        offered = OfferedTools()
        for index, body in enumerate(self.tools or ()):
            offered.add(body.offered(f"tools[{index}]"))
        return offered


def read_messages(messages: Sequence[OllamaMessageBody]) -> list[dict[str, Any]]:
    """Return messages with the field names of OpenAI's API.

    A tool's result names its call by id. If it names only the tool, or nothing, it belongs to the
    first call of that tool, or of any, that has no result yet.
    """
    turns: list[dict[str, Any]] = []
    open_calls: list[dict[str, Any]] = []  # calls that have no result yet
    for number, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            turn["tool_calls"] = [
                _call(call, f"call_{number}_{index}")
                for index, call in enumerate(message.tool_calls)
            ]
            open_calls = list(turn["tool_calls"])
        elif message.role == "tool":
            turn |= _answered(message, open_calls)
        turns.append(turn)
    return turns


def _call(call: CallBody, other_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or other_id, "type": "function", "function": function}


def _answered(message: OllamaMessageBody, open_calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the id and the name of the call that a result belongs to; remove it from the list."""
    name = message.tool_name or message.name
    for call in open_calls:
        known = call["function"]["name"]
        fits = call["id"] == message.tool_call_id if message.tool_call_id else name in (None, known)
        if fits:
            open_calls.remove(call)
            return {"tool_call_id": call["id"], "name": name or known}
    named = {"name": name} if name else {}
    return {"tool_call_id": message.tool_call_id or "call_unknown", **named}


def _check_context(value: object) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("a list of token ids")
    return token_ids(value, "a list of token ids")


class GenerateBody(AnswerBody):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: Literal["", None] = None
    raw: bool | None = None
    context: Annotated[list[int], PlainValidator(_check_context)] = Field(default_factory=list)
    images: NoImages = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_a_template(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("template"):
            raise unsupported(
                "template",
                "`template` cannot be honoured: the model's own chat template is used. Leave it "
                "out, or send a whole prompt with `raw`.",
            )
        return body

    @model_validator(mode="after")
    def _can_be_honoured(self) -> "GenerateBody":
        if self.raw and self.context:
            raise invalid("context", "`context` cannot be combined with `raw`; leave one out.")
        if self.suffix and (self.context or self.system):
            other = "context" if self.context else "system"
            raise invalid(other, f"`{other}` cannot be combined with `suffix`; leave one out.")
        return self

    def conversation(self) -> Conversation:
        """Return the prompt as the first turn of a conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Conversation(
            messages=[*system, {"role": "user", "content": self.prompt or ""}],
            output_format=self.format,
            thinking=self.thinking(),
        )


def _check_texts(value: object) -> list[str]:
    if value == "":
        return []  # Ollama answers an empty text without vectors
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong_type("a text or a list of texts")
    if len(texts) > MAX_EMBEDDED_TEXTS:
        raise ValueError(f"{len(texts)} texts were given; at most {MAX_EMBEDDED_TEXTS} are allowed")
    return texts


class EmbedBody(ModelBody, CheckedBody):
    """The body of /api/embed."""

    known_fields = VECTOR_FIELDS

    input: Annotated[list[str], PlainValidator(_check_texts)] = Field(default_factory=list)
    truncate: bool | None = None  # left out: true
    dimensions: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    keep_alive: KeepAlive | None = None


class EmbeddingsBody(ModelBody, CheckedBody):
    """The body of /api/embeddings, which is older than /api/embed."""

    known_fields = VECTOR_FIELDS

    prompt: str | None = None
    keep_alive: KeepAlive | None = None
