"""The body of /v1/responses, and the conversation that it stands for."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from headroom.engine.request import MAX_LOGPROBS, SamplingParams
from headroom.server.invalid_bodies import short
from headroom.server.offered_tools import OfferedTools, read_choice
from headroom.server.output_formats import FormatFields
from headroom.server.refusals import RefusalError
from headroom.server.responses_input import ItemBody, input_items, make_messages
from headroom.server.responses_tools import ResponsesToolBody, offered_tools
from headroom.server.schemas import Body, GenerationBody, MaxTokens, unsupported
from headroom.server.thinking_fields import ReasoningBody, ThinkingFields
from headroom.text.conversation import Conversation, OutputFormat

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # entries, characters, characters
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Includable = Literal[
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs", "reasoning.encrypted_content", "message.output_text.logprobs",
]  # fmt: skip
Summary = Literal["auto", "concise", "detailed", "none"]


class SummaryBody(ReasoningBody):
    """How the model thinks, and whether its thoughts are also sent as summary."""

    summary: Summary | None = None
    generate_summary: Summary | None = None  # the older name of `summary`
    context: Literal["auto", "current_turn", "all_turns"] | None = None

    @property
    def summarises(self) -> bool:
        """Whether thoughts are also sent as summaries."""
        return (self.summary or self.generate_summary or "none") != "none"

    def shown(self) -> dict[str, Any]:
        """Return the field as the Response object shows it."""
        summary = (self.summary or self.generate_summary) if self.summarises else None
        context = {} if self.context is None else {"context": self.context}
        return {"effort": self.effort, "summary": summary, **context}


class FormatBody(Body):
    """What the text of the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "FormatBody":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("a format of type 'json_schema' needs `schema`")
        return self

    def output_format(self) -> OutputFormat | None:
        """Return what the answer must match; None for any text."""
        if self.type == "text":
            return None
        return OutputFormat(kind=self.type, value=self.schema_, param="text.format.schema")

    def shown(self) -> dict[str, Any]:
        """Return the format as the Response object shows it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {
            "type": self.type,
            "name": self.name or "response",
            "description": self.description,
            "schema": self.schema_,
            "strict": bool(self.strict),
        }


class TextBody(Body):
    """The format and the verbosity of the answer's text."""

    format: FormatBody | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def _check_metadata(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_METADATA:
        raise ValueError(f"{len(value)} entries were given; at most {MAX_METADATA} are allowed")
    for key, text in value.items():
        if len(key) > MAX_KEY or (isinstance(text, str) and len(text) > MAX_VALUE):
            raise ValueError(
                f"a key may have at most {MAX_KEY} characters, and a value at most {MAX_VALUE}"
            )
    return value


class InputBody(ThinkingFields, FormatFields):
    """The fields from which the prompt is made; the body of /v1/responses/input_tokens."""

    model: str | None = None
    input: Annotated[
        Annotated[list[ItemBody], Field(fail_fast=True)] | None, BeforeValidator(input_items)
    ] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ResponsesToolBody], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: SummaryBody | None = None
    text: TextBody | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def offered_tools(self, items: Sequence[ItemBody]) -> OfferedTools:
        """Return the tools that may be called: those of the field and those of items."""
        later = [tool for item in reversed(items) for tool in item.tools or ()]
        return offered_tools(self.tools or (), later)

    def conversation(
        self, earlier: Sequence[ItemBody], given: Sequence[ItemBody], offered: OfferedTools
    ) -> Conversation:
        """Return the body as a `Conversation`."""
        messages = make_messages(earlier, given, self.instructions, offered)
        if not messages:
            raise RefusalError(
                400, "missing_required_parameter", "`input` is empty.", param="input"
            )
        offer = offered.choose(
            read_choice(self.tool_choice, nested=False),
            parallel=self.parallel_tool_calls is not False,
        )
        form = self.output_format()
        if self.text is not None and self.text.format is not None:
            form = self.text.format.output_format() or form
        return Conversation(
            messages=messages,
            tools=offer.tools,
            tool_choice=offer.choice,
            # An answer that must be a call has no text that could match a format.
            output_format=None if offer.choice.mode == "required" else form,
            thinking=self.asked_thinking(),
            template_variables=self.template_variables(),
        )


class ResponseBody(InputBody, GenerationBody):
    """The body of /v1/responses; it accepts the sampling settings of the chat API, too."""

    not_honoured = ("response_format",)

    max_output_tokens: MaxTokens | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_check_metadata)] = None
    service_tier: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_one_answer(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("n") not in (None, 1):
            raise unsupported("n", f"`n` is {short(body['n'])}; a response has only one answer.")
        return body

    @model_validator(mode="after")
    def _has_input(self) -> "ResponseBody":
        if self.input is None and self.previous_response_id is None and not self.instructions:
            raise RefusalError(
                400, "missing_required_parameter", "`input` is required.", param="input"
            )
        return self

    @property
    def includes_logprobs(self) -> bool:
        """Whether the tokens of the text are reported with their logprobs."""
        return LOGPROBS in (self.include or ())

    @property
    def includes_encrypted(self) -> bool:
        """Whether thoughts are also sent as `encrypted_content`."""
        return ENCRYPTED in (self.include or ())

    @property
    def summarises(self) -> bool:
        """Whether thoughts are also sent as summaries."""
        return self.reasoning is not None and self.reasoning.summarises

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the body gives, by name."""
        settings = super().sampling()
        if self.max_output_tokens is not None:
            settings["max_tokens"] = self.max_output_tokens
        if self.includes_logprobs:
            settings["logprobs"] = self.top_logprobs or 0
        return settings

    def asked(self, default_sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the Response object that repeat the request."""
        usual = SamplingParams()
        sampling = {"temperature": usual.temperature, "top_p": usual.top_p, **default_sampling}
        sampling |= self.sampling()
        text = self.text or TextBody()
        form = {"type": "text"} if text.format is None else text.format.shown()
        reasoning = self.reasoning or SummaryBody()
        choice = "auto" if self.tool_choice is None else self.tool_choice
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "tools": [tool.shown() for tool in self.tools or ()],
            "tool_choice": "required" if choice == "any" else choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "max_tool_calls": self.max_tool_calls,
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            "top_logprobs": self.top_logprobs or 0,
            "max_output_tokens": self.max_output_tokens,
            "reasoning": reasoning.shown(),
            "text": {"format": form, "verbosity": text.verbosity or "medium"},
            "truncation": self.truncation or "disabled",
            "background": False,
            "conversation": None,
            "prompt": None,
            "store": self.store is not False,
            "metadata": self.metadata or {},
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": None,
        }
