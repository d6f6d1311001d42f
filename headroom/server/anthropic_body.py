"""The bodies of Anthropic's Messages API, and the conversations that they stand for."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from headroom.server.answer_fields import THOUGHTS_OFF
from headroom.server.anthropic_errors import NO_THREADS
from headroom.server.anthropic_history import AnthropicMessageBody, History, TextBlocks, system_text
from headroom.server.invalid_bodies import short
from headroom.server.openai_tools import ToolName
from headroom.server.refusals import RefusalError
from headroom.server.schemas import (
    Body,
    GenerationBody,
    Positive,
    check_stops,
    invalid,
)
from headroom.server.thinking_fields import Effort, TemplateFields
from headroom.text.conversation import Conversation, OutputFormat, Thinking, Tool, ToolChoice


def _check_tool_kind(value: object) -> object:
    """Refuse tools that Anthropic defines: those its servers run, and those without a schema."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise ValueError(
            f"tools of type {short(kind)!r} are not supported: this server runs no tools itself; "
            "describe a tool that the client runs by its name and input_schema"
        )
    return value


class AnthropicToolBody(Body):
    """A tool that the client runs."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]  # JSON schema of the input, an object
    strict: bool | None = None

    def tool(self, index: int) -> Tool:
        """Return the tool at a place in `tools` as a `Tool`."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.input_schema,
            strict=bool(self.strict),
            param=f"tools[{index}].input_schema",
        )


class ToolChoiceBody(Body):
    """Whether a tool may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # with "tool"
    disable_parallel_tool_use: bool | None = None


class AnthropicThinkingBody(Body):
    """Whether the model thinks, for how many tokens, and whether its thoughts are shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicFormatBody(Body):
    """What the text of the answer must match."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputBody(Body):
    """The effort of the thought, and the format of the answer."""

    effort: Effort | None = None
    format: AnthropicFormatBody | None = None


class PromptBody(TemplateFields, GenerationBody):
    """The fields from which the prompt is made; the body of /v1/messages/count_tokens."""

    harmless = THOUGHTS_OFF  # without `thinking`
    not_honoured = ("n",)

    messages: Annotated[list[AnthropicMessageBody], Field(min_length=1, fail_fast=True)]
    system: TextBlocks | None = None
    tools: (
        Annotated[
            list[Annotated[AnthropicToolBody, BeforeValidator(_check_tool_kind)]],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: ToolChoiceBody | None = None
    thinking: AnthropicThinkingBody | None = None
    output_config: OutputBody | None = None
    output_format: AnthropicFormatBody | None = None  # older name of `output_config.format`
    context_management: dict[str, Any] | None = None
    thread: Any = None

    @model_validator(mode="after")
    def _sends_the_whole_conversation(self) -> "PromptBody":
        if self.thread is not None:
            raise RefusalError(
                400,
                NO_THREADS,
                "This server keeps no conversations; leave `thread` out and send all messages.",
                param="thread",
            )
        return self

    @property
    def hides_thoughts(self) -> bool:
        """Whether thoughts are sent without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def conversation(self) -> Conversation:
        """Return the body as a `Conversation`."""
        history = History(system_text(self.system or []), self.messages)
        tools = self._offered_tools()
        if history.continues and history.turns[-1].get("tool_calls"):
            raise invalid(
                "messages",
                "The last message calls tools. Add a message with a tool_result for each call.",
            )
        return Conversation(
            messages=history.turns,
            tools=tools,
            tool_choice=self._choice(tools),
            output_format=self._asked_format(),
            thinking=self._asked_thinking(),
            template_variables=self.template_variables(),
            continues=history.continues,
        )

    def _offered_tools(self) -> tuple[Tool, ...]:
        tools = tuple(body.tool(index) for index, body in enumerate(self.tools or ()))
        names = [tool.name for tool in tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                where = f"tools[{index}].name"
                raise invalid(where, f"{where}: two tools have the name {short(name)!r}.")
        return tools

    def _choice(self, tools: tuple[Tool, ...]) -> ToolChoice:
        choice = self.tool_choice or ToolChoiceBody(type="auto")
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "none":
            return ToolChoice(mode="none")
        if choice.type == "auto":
            return ToolChoice(parallel=parallel)
        if not tools:
            raise invalid(
                "tool_choice", f"tool_choice has the type {choice.type!r}, but there are no tools."
            )
        if choice.type == "any":
            return ToolChoice(mode="required", parallel=parallel)
        if choice.name not in [tool.name for tool in tools]:
            what = "is required" if choice.name is None else f"{short(choice.name)!r} is not a tool"
            names = short(", ".join(tool.name for tool in tools))
            raise invalid("tool_choice.name", f"tool_choice.name {what}; the tools are: {names}.")
        return ToolChoice(mode="required", name=choice.name, parallel=parallel)

    def _asked_format(self) -> OutputFormat | None:
        within = self.output_config.format if self.output_config is not None else None
        body = within or self.output_format
        if body is None:
            return None
        field = "output_format" if within is None else "output_config.format"
        return OutputFormat(kind="json_schema", value=body.json_schema, param=f"{field}.schema")

    def _asked_thinking(self) -> Thinking:
        """Return whether the model thinks; without the field it does not, as in Anthropic's API."""
        if self.thinking is None:
            return Thinking(enabled=self.template_variables().get("enable_thinking") is True)
        if self.thinking.type == "disabled":
            return Thinking(enabled=False)
        effort = self.output_config.effort if self.output_config is not None else None
        return Thinking(
            enabled=effort != "none",
            effort=None if effort == "none" else effort,
            budget=self.thinking.budget_tokens,
        )


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: Positive  # may be larger than the context
    stop_sequences: Annotated[tuple[str, ...], PlainValidator(check_stops)] = ()

    @model_validator(mode="after")
    def _has_a_budget_below_the_limit(self) -> "MessagesBody":
        thinking = self.thinking
        if thinking is None or thinking.budget_tokens is None or thinking.type != "enabled":
            return self
        if thinking.budget_tokens >= self.max_tokens:
            raise invalid(
                "thinking.budget_tokens",
                f"thinking.budget_tokens is {thinking.budget_tokens}; it must be less than "
                f"max_tokens, which is {self.max_tokens}.",
            )
        return self

    def sampling(self) -> dict[str, Any]:
        """Return the sampling settings that the body gives, by name."""
        settings = super().sampling()
        if self.stop_sequences:
            settings["stop"] = self.stop_sequences
        return settings
