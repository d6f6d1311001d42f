"""Request bodies: read within their limits, checked, refused where first known to be wrong."""

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import ClientDisconnect

from headroom.engine.request import MAX_LOGPROBS, MAX_SEED
from headroom.server.refusals import RefusalError, refuse_invalid

MAX_CHOICES = 128  # answers to one prompt
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_COUNT = (1 << 31) - 1  # what any count of tokens may be
BODY_S = 60.0  # a client that sends no whole body in this time is not waited for
DRAIN_BYTES = 64 << 20  # what is read of a body that is too long, so that its sender sees why

Role = Literal["system", "developer", "user", "assistant", "tool"]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _wrong_type(expected: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_type", "input should be {expected}", {"expected": expected})


def _token_ids(values: Iterable[object], expected: str) -> list[int]:
    ids = []
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_type(expected)
        if not 0 <= value <= MAX_COUNT:
            raise ValueError(f"there is no token {_short(value)}")
        ids.append(value)
    return ids


def _check_tokens(value: object) -> list[int]:
    expected = "a list of token ids"
    if not isinstance(value, list):
        raise _wrong_type(expected)
    return _token_ids(value, expected)


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "beyond 64 bits"
    return text if len(text) <= 40 else text[:40] + "..."


def _check_prompts(value: object) -> list[str | list[int]]:
    """Return the prompts that a text, a list of texts, token ids or lists of them stand for."""
    expected = "a text, a list of texts, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong_type(expected)
    if not value:
        raise ValueError("there is no prompt in the list")
    if isinstance(value[0], int):
        return [_token_ids(value, expected)]
    prompts: list[str | list[int]] = []
    for item in value:
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise _wrong_type(expected)
        prompts.append(item if isinstance(item, str) else _token_ids(item, expected))
    return prompts


def _check_stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _wrong_type("a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop texts were given; at most {MAX_STOPS} are taken")
    for stop in stops:
        if not isinstance(stop, str):
            raise _wrong_type("a text or a list of texts")
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise ValueError(
                f"a stop text has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}"
            )
    return tuple(stops)


def _check_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong_type("an object from token ids to numbers")
    biases = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ValueError(f"{_short(key)!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _check_content(value: object) -> str | None:
    """Return a message's text; several text parts are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong_type("a text or a list of text parts")
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise _wrong_type("a text or a list of text parts")
    if part["type"] not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"parts of type {_short(part['type'])!r} cannot be read, only text")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise _wrong_type("a text part with its text")
    return text


def _unsupported(param: str, message: str) -> RefusalError:
    return RefusalError(400, "unsupported_parameter", message, param=param)


class Body(BaseModel):
    """A JSON object whose unknown fields are ignored, since clients send many."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StreamOptions(Body):
    """What a streamed answer tells besides its text."""

    include_usage: bool | None = None


# Of other servers and of later APIs: each would change what an answer is. Null, false, 0, "none"
# and what is empty ask for nothing.
NOT_HONOURED = (
    "functions", "function_call", "audio", "web_search_options", "grammar", "json_schema",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "min_tokens",
)  # fmt: skip


class GenerationBody(Body):
    """What chat and completions have in common; a null is as good as nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Positive | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Count | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    penalty_window: Count | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_check_bias)] = {}
    stop: Annotated[tuple[str, ...], PlainValidator(_check_stops)] = ()
    ignore_eos: bool | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _asks_for_what_there_is(cls, body: Any) -> Any:
        given = body if isinstance(body, dict) else {}
        for name in NOT_HONOURED:
            if given.get(name) not in (None, False, 0, "", "none", [], {}):
                raise _unsupported(name, f"`{name}` cannot be honoured; leave it out.")
        if given.get("modalities") not in (None, [], ["text"]):
            raise _unsupported("modalities", "Answers are text; leave `modalities` out.")
        return body

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Message(Body):
    """One turn of a conversation."""

    role: Role
    content: Annotated[str | None, PlainValidator(_check_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        turn = self.model_dump(exclude_none=True)
        # Few templates know the newer name of the system's role.
        turn["role"] = "system" if self.role == "developer" else self.role
        return {**turn, "content": self.content or ""}


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: Any = None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise _unsupported("top_logprobs", "top_logprobs needs logprobs to be true.")
        if self.tools and self.tool_choice != "none":
            raise _unsupported("tools", "Tools cannot be called yet; leave `tools` out.")
        form = self.response_format
        if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
            raise _unsupported("response_format", "Answers can only have the format 'text'.")
        return self


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_check_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Positive | None = None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> "CompletionBody":
        if self.suffix:
            raise _unsupported("suffix", "A suffix is not supported: text is only continued.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = f"best_of is {self.best_of}; it can only equal n, which is {self.n or 1}."
            raise _unsupported("best_of", message)
        return self


class TokenizeBody(Body):
    """The body of /tokenize."""

    content: str | None = None
    text: str | None = None  # another name of `content`
    add_special: bool = False  # begin with the model's first token, where it has one
    parse_special: bool = True  # read the text of special tokens as those tokens
    with_pieces: bool = False

    @model_validator(mode="after")
    def _has_text(self) -> "TokenizeBody":
        if self.content is None and self.text is None:
            raise RefusalError(
                400,
                "missing_required_parameter",
                "content: this field is required.",
                param="content",
            )
        return self


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: Annotated[list[int], PlainValidator(_check_tokens)]


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, schema: type[AnyBody], max_bytes: int) -> AnyBody:
    """Return the request's body as `schema`, or refuse it."""
    data = await _read_bytes(request, max_bytes)
    try:
        # Unlike the standard library's, this parser refuses NaN, deep nesting and half characters.
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RefusalError(400, "invalid_json", f"The body is not JSON: {error}.") from error
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise refuse_invalid(error) from error


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    too_long = announced.isdigit() and int(announced) > max_bytes
    if too_long and int(announced) > DRAIN_BYTES:
        raise _too_long(max_bytes)
    data, seen = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                seen += len(piece)
                if seen > DRAIN_BYTES:
                    break
                if seen <= max_bytes:
                    data += piece
    except TimeoutError as error:
        message = f"The body did not arrive within {BODY_S:.0f} seconds."
        raise RefusalError(408, "request_timeout", message) from error
    except ClientDisconnect as error:
        raise RefusalError(400, "incomplete_body", "The body ended before its length.") from error
    if too_long or seen > max_bytes:
        raise _too_long(max_bytes)
    return bytes(data)


def _too_long(max_bytes: int) -> RefusalError:
    return RefusalError(
        413,
        "request_too_large",
        f"The body has more than {max_bytes} bytes.",
        hint="The server's --max-body sets the limit.",
    )
