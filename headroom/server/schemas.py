"""Request bodies: how they are read and checked, and the fields that several endpoints share."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_origin, get_type_hints

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import ClientDisconnect

from headroom.engine.request import SamplingParams, user_settings
from headroom.server.refusals import RefusalError, refuse_invalid

MAX_CHOICES = 128  # answers to one prompt
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_COUNT = (1 << 31) - 1  # the largest count of tokens and the largest token id
BODY_S = 60.0  # seconds that a client has to send a whole body
# A body that is too long is read up to this many bytes, so that its sender gets to see the refusal.
DRAIN_BYTES = 64 << 20

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _check_max_tokens(value: int) -> int:
    """Refuse 0; the range of the field has refused what is below -1."""
    if value == 0:
        raise ValueError("input should be at least 1, or -1 for as many as the context holds")
    return value


MaxTokens = Annotated[int, Field(ge=-1, le=MAX_COUNT), AfterValidator(_check_max_tokens)]


def wrong_type(expected: str) -> PydanticCustomError:
    """Return the error for a value of the wrong type; `expected` says what it should be."""
    return PydanticCustomError("wrong_type", "input should be {expected}", {"expected": expected})


def token_ids(values: Iterable[object], expected: str) -> list[int]:
    """Return values as token ids, or refuse them; `expected` describes the whole field."""
    ids = []
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(expected)
        if not 0 <= value <= MAX_COUNT:
            raise ValueError(f"there is no token {short(value)}")
        ids.append(value)
    return ids


def prompt_list(value: object) -> list[str | list[int]]:
    """Return the list of prompts; the field is one prompt or a list of them, texts or token ids."""
    expected = "a text, a list of texts, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type(expected)
    if not value:
        raise ValueError("there is no prompt in the list")
    if isinstance(value[0], int):
        return [token_ids(value, expected)]
    prompts: list[str | list[int]] = []
    for item in value:
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise wrong_type(expected)
        prompts.append(item if isinstance(item, str) else token_ids(item, expected))
    return prompts


def short(value: object) -> str:
    """Return a client's value as text for an error message, cut at 40 characters."""
    text = str(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "beyond 64 bits"
    return text if len(text) <= 40 else text[:40] + "..."


def check_stops(value: object) -> tuple[str, ...]:
    """Return the texts that end an answer, or refuse them."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong_type("a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop texts were given; at most {MAX_STOPS} are taken")
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type("a text or a list of texts")
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise ValueError(
                f"a stop text has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARACTERS}"
            )
    return tuple(stops)


def _check_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong_type("an object from token ids to numbers")
    biases = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ValueError(f"{short(key)!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def unsupported(param: str, message: str) -> RefusalError:
    """Return the refusal of a field that this server cannot honour."""
    return RefusalError(400, "unsupported_parameter", message, param=param)


def invalid(param: str, message: str) -> RefusalError:
    """Return the refusal of a value that the field `param` cannot have."""
    return RefusalError(400, "invalid_value", message, param=param)


class Body(BaseModel):
    """A JSON object; unknown fields are ignored, since clients send many."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StreamOptions(Body):
    """What a streamed answer reports besides its text."""

    include_usage: bool | None = None


# Fields of other servers and of newer APIs that would change the answer, with the values that ask
# for nothing beside the empty ones. Any other value is refused.
NOT_HONOURED: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (), "modalities": (["text"],),
    # vLLM
    "min_tokens": (), "use_beam_search": (), "length_penalty": (1,), "bad_words": (),
    "allowed_token_ids": (), "stop_token_ids": (), "include_stop_str_in_output": (),
    "truncate_prompt_tokens": (), "logits_processors": (),
    "prompt_embeds": (),
    # llama.cpp
    "mirostat": (), "typical_p": (1,), "tfs_z": (1,), "top_n_sigma": (-1,), "dynatemp_range": (),
    "xtc_probability": (), "dry_multiplier": (), "samplers": (), "lora": (), "repeat_last_n": (64,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
}  # fmt: skip
EMPTY: tuple[object, ...] = (None, False, 0, "", "none", [], {})
# As above, but an empty object or 0 asks for something, too.
MUST_BE_NULL = ("web_search_options", "prompt_logprobs")
# As above, but only null and true ask for nothing, for endpoints without such a field.
MUST_BE_TRUE = ("skip_special_tokens", "add_generation_prompt")
# Other servers' names of sampling settings.
ALIASES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


def _sampling_field(setting: "DataclassField[Any]") -> Any:
    """Return the type and the default of the body field of one sampling setting."""
    kind = get_type_hints(SamplingParams)[setting.name]
    if get_origin(kind) is Mapping:
        return Annotated[dict[int, float], PlainValidator(_check_bias)], {}
    if get_origin(kind) is tuple:
        return Annotated[tuple[str, ...], PlainValidator(check_stops)], ()
    if kind is bool:
        return bool | None, None
    if kind is float:  # SamplingParams checks the bounds, after the default is filled in
        return Number | None, None
    if setting.name == "max_tokens":
        return MaxTokens | None, None
    low, high = setting.metadata["min"], setting.metadata["max"]
    most = MAX_COUNT if high is None else high
    return Annotated[int, Field(ge=low, le=most)] | None, None


if TYPE_CHECKING:

    class SamplingFields(Body):
        """A body with one field for each sampling setting that users give."""
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{setting.name: _sampling_field(setting) for setting in user_settings()},
    )


def refuse_unhonoured(
    body: Mapping[str, Any],
    fields: Mapping[str, tuple[object, ...]],  # by name: the values that ask for nothing
    prefix: str = "",  # before the name of a field in errors: where the fields stand in the body
) -> None:
    """Refuse a body whose fields ask for what the server cannot do."""
    for name, neutral in fields.items():
        if name in body and body[name] not in (*EMPTY, *neutral):
            raise unsupported(
                f"{prefix}{name}", f"`{prefix}{name}` cannot be honoured; leave it out."
            )


class GenerationBody(SamplingFields):
    """The fields that chat and completions share; null is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None

    # As NOT_HONOURED, for the fields that one endpoint cannot honour and another can.
    also_not_honoured: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_be_honoured(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        refuse_unhonoured(body, {**NOT_HONOURED, **cls.also_not_honoured})
        for name in MUST_BE_NULL:
            if body.get(name) is not None:
                raise unsupported(name, f"`{name}` cannot be honoured; leave it out.")
        for name in MUST_BE_TRUE:
            if name not in cls.model_fields and body.get(name) not in (None, True):
                raise unsupported(name, f"`{name}` can only be true; leave it out.")
        renamed = {
            name: body[other]
            for other, name in ALIASES.items()
            if other in body and body.get(name) is None
        }
        return {**body, **renamed}

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the body gives, by name."""
        given = ((setting.name, getattr(self, setting.name)) for setting in user_settings())
        return {name: value for name, value in given if value is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, schema: type[AnyBody], max_bytes: int) -> AnyBody:
    """Return the request's body as `schema`, or refuse it."""
    data = await _read_bytes(request, max_bytes)
    try:
        # Unlike the standard library's, this parser refuses NaN, deep nesting and lone surrogates.
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
