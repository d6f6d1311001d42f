"""Reads and checks request bodies; the fields that several endpoints share."""

import asyncio
import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_origin, get_type_hints

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from headroom.engine.request import MAX_COUNT, SamplingParams, user_settings
from headroom.server.answer_fields import (
    ANSWER_FIELDS,
    AnswerField,
    Values,
    refuse_undeclared,
)
from headroom.server.invalid_bodies import refuse_invalid, short, wrong_type, wrong_value
from headroom.server.json_limits import check_json_size
from headroom.server.refusals import RefusalError, shutting_down
from headroom.server.request_log import current_record

MAX_CHOICES = 128  # answers to one prompt
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
SMALL_BODY_BYTES = 64 << 10  # larger bodies are parsed and checked in a thread
MOST_KEY_LENGTH = 1024  # characters of a cache key
BODY_S = 60.0  # seconds that a client has to send a whole body
# What the model reads instead of a picture in a tool's result. Such a picture is not refused: the
# client cannot change what the tool returned.
LEFT_OUT_PART = "[{kind} left out: this model reads text only]"
# A body that is too long is still read up to this many bytes: a client that cannot finish sending
# would not read the error.
DRAIN_BYTES = 64 << 20
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of half a surrogate pair

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _check_max_tokens(value: int) -> int:
    """Refuse 0; the field's range already refuses numbers below -1."""
    if value == 0:
        raise wrong_value("at least 1, or -1 for as many as the context holds")
    return value


MaxTokens = Annotated[int, Field(ge=-1, le=MAX_COUNT), AfterValidator(_check_max_tokens)]


def token_ids(values: Iterable[object], expected: str) -> list[int]:
    """Return values as token ids, or refuse them; `expected` describes the whole field."""
    ids = []
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(expected)
        if not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{short(value)} is not a token id")
        ids.append(value)
    return ids


def prompt_list(value: object) -> list[str | list[int]]:
    """Return a field's prompts as a list; each prompt is text or a list of token ids."""
    expected = "a text, a list of texts, a list of token ids or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type(expected)
    if not value:
        raise ValueError("the list of prompts is empty")
    if isinstance(value[0], int):
        return [token_ids(value, expected)]
    prompts: list[str | list[int]] = []
    for item in value:
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            raise wrong_type(expected)
        prompts.append(item if isinstance(item, str) else token_ids(item, expected))
    return prompts


def check_stops(value: object) -> tuple[str, ...]:
    """Return the texts that end an answer, or refuse them."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong_type("a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop texts were given; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type("a text or a list of texts")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"a stop text has {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
            )
    return tuple(stop for stop in stops if stop)  # clients send "" for none


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


def _all_tokens(top_k: object) -> object:
    """Return a top-k of -1, by which other servers mean all tokens, as 0."""
    return 0 if top_k == -1 else top_k


def unsupported(param: str, message: str) -> RefusalError:
    """Return the error for a field that this server does not support."""
    return RefusalError(400, "unsupported_parameter", message, param=param)


def invalid(param: str, message: str) -> RefusalError:
    """Return the error for a value that the field `param` cannot have."""
    return RefusalError(400, "invalid_value", message, param=param)


class Body(BaseModel):
    """A JSON object; unknown fields are ignored, because clients send many."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class StreamOptions(Body):
    """What a streamed answer reports besides its text."""

    include_usage: bool | None = None


# Names that other servers have for settings of this one.
FOREIGN_NAMES = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_output_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "stop_sequences": "stop",
}


class CheckedBody(Body):
    """A body that refuses fields of other APIs, if they would change its answer."""

    known_fields: ClassVar[Mapping[str, AnswerField]] = ANSWER_FIELDS
    harmless: ClassVar[Mapping[str, Values]] = {}  # further values that change nothing here
    not_honoured: ClassVar[Collection[str]] = ()  # fields of base classes that are refused here
    foreign_names: ClassVar[Mapping[str, str]] = {}  # other names of the fields
    prefix: ClassVar[str] = ""  # of field names in errors, such as "options."

    @model_validator(mode="before")
    @classmethod
    def _refuse_undeclared_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        declared -= set(cls.not_honoured)
        body = dict(body)
        for other, name in cls.foreign_names.items():
            # A second name with another value stays, and is refused.
            if other in body and other not in declared and body.get(name) in (None, body[other]):
                body[name] = body.pop(other)
        refuse_undeclared(body, cls.known_fields, declared, cls.harmless, cls.prefix)
        return body


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
    if setting.name == "top_k":
        return Annotated[int, Field(ge=low, le=high), BeforeValidator(_all_tokens)] | None, None
    return Annotated[int, Field(ge=low, le=high)] | None, None


if TYPE_CHECKING:

    class SamplingFields(Body):
        """A body with one field for each sampling setting that users give."""
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{setting.name: _sampling_field(setting) for setting in user_settings()},
    )


class CacheFields(Body):
    """The fields by which clients say which requests may share the beginnings of their prompts."""

    cache_prompt: bool | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MOST_KEY_LENGTH)] | None = None

    @property
    def cache_key(self) -> str | None:
        """The key of all prompts that share prefixes with this one's; None: there are none."""
        return None if self.cache_prompt is False else self.prompt_cache_key or ""


class GenerationBody(CacheFields, SamplingFields, CheckedBody):
    """The fields that chat and completions share; null counts as a field that is left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    draft: str | None = None  # what guesses tokens ahead; SamplingParams checks it

    foreign_names = FOREIGN_NAMES

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the body gives, by name."""
        names = [*(setting.name for setting in user_settings()), "draft"]
        given = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in given if value is not None}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, schema: type[AnyBody], max_bytes: int) -> AnyBody:
    """Return the request's body as a `schema`; raise RefusalError if it cannot be one."""
    data = (await _read_bytes(request, max_bytes)).removeprefix(codecs.BOM_UTF8)
    _check_encoding(request)
    current_record().body_bytes = len(data)
    if len(data) <= SMALL_BODY_BYTES:
        body = _checked(data, schema)
    else:
        body = await request.app.state.service.in_thread(_checked, data, schema)
    if isinstance(body, CacheFields):
        current_record().cache_key = body.cache_key
    return body


def _checked(data: bytes, schema: type[AnyBody]) -> AnyBody:
    check_json_size(data)
    try:
        value = _parse(data)
    except ValueError as error:
        raise RefusalError(400, "invalid_json", f"The body is not JSON: {error}.") from error
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise refuse_invalid(error, value) from error


def _check_encoding(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RefusalError(
            415,
            "unsupported_media_type",
            f"The body has the content encoding {encoding[:100]!r}; the server unpacks no bodies.",
            hint="Send it without Content-Encoding.",
        )


def _parse(data: bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is not one.

    Agents cut texts in the midst of a character, and write the half of its surrogate pair that is
    left as an escape. It is read as the replacement character.
    """
    try:
        # Unlike the standard library's, this parser refuses NaN, deep nesting and lone surrogates.
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        if (mended := _without_lone_surrogates(data)) is None:
            raise
        return from_json(mended, allow_inf_nan=False)


def _without_lone_surrogates(data: bytes) -> bytes | None:
    """Return a JSON text with replacement characters for lone surrogates; None if it has none."""
    if SURROGATE.search(data) is None:
        return None
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    too_long = announced.isdigit() and int(announced) > max_bytes
    if too_long and int(announced) > DRAIN_BYTES:
        raise _too_long(max_bytes)
    data, seen = bytearray(), 0
    service = request.app.state.service
    limit = asyncio.timeout(BODY_S)
    service.uploads.add(limit)
    try:
        async with limit:
            async for piece in request.stream():
                seen += len(piece)
                if seen > DRAIN_BYTES:
                    break
                if seen <= max_bytes:
                    data += piece
    except TimeoutError as error:
        if service.stopping:
            raise shutting_down() from error
        message = f"The body did not arrive within {BODY_S:.0f} seconds."
        raise RefusalError(408, "request_timeout", message) from error
    except ClientDisconnect as error:
        raise RefusalError(400, "incomplete_body", "The body ended before its length.") from error
    finally:
        service.uploads.discard(limit)
    if too_long or seen > max_bytes:
        raise _too_long(max_bytes)
    return bytes(data)


def _too_long(max_bytes: int) -> RefusalError:
    return RefusalError(
        413,
        "request_too_large",
        f"The body has more than {max_bytes} bytes.",
        hint="Send less, or start the server with a larger --max-body.",
    )
