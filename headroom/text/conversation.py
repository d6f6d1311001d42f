"""Conversation: one chat request, in a form that all APIs are converted to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headroom.errors import RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, with the field names of OpenAI's API
FormatKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]
ChoiceMode = Literal["auto", "none", "required"]
INPUT = "input"  # the only argument of a function that stands for a custom (plain-text) tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of the arguments
    strict: bool = False  # the arguments must match the schema
    grammar: str = ""  # Lark grammar of the argument INPUT; "": its schema is enough
    param: str = field(default="tools", compare=False)  # the API's field of the tool, for errors

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: an object as in OpenAI's API."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": {}, **self.parameters},
        }
        return {"type": "function", "function": function}


def text_tool(
    name: str,
    description: str,
    *,
    regex: str = "",  # what the text must match; "": any text
    lark: str = "",
    param: str = "tools",
) -> Tool:
    """Return a function with one text argument, which stands for a custom (plain-text) tool."""
    text: dict[str, Any] = {"type": "string", "description": "The whole input of the tool."}
    if regex:
        text["pattern"] = f"^(?:{regex})$"
    if lark:
        note = f"The input must match this Lark grammar:\n{lark}"
        description = f"{description}\n\n{note}".lstrip()
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
        strict=bool(regex or lark),
        grammar=lark,
        param=param,
    )


def as_tool(given: Tool | Mapping[str, Any]) -> Tool:
    """Return a tool that was given as a `Tool` or as an object of OpenAI's API."""
    if isinstance(given, Tool):
        return given
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            "A tool is not an object with the name of a function.",
            hint='Write it as {"type": "function", "function": {"name": ..., "parameters": ...}}.',
            param="tools",
        )
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {},
        strict=bool(function.get("strict")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool, and which tool."""

    mode: ChoiceMode = "auto"
    name: str | None = None  # with "required": the tool that must be called, exactly once
    parallel: bool = True  # whether one answer may have several calls

    def __post_init__(self) -> None:
        if self.mode not in get_args(ChoiceMode):
            raise RequestError(
                f"tool_choice is {_shown(self.mode)}; it must be 'auto', 'none' or 'required'.",
                hint='For a tool by its name: ToolChoice(mode="required", name=...).',
                param="tool_choice",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What the text of an answer must match."""

    kind: FormatKind
    value: Any = None  # a JSON schema, a regular expression, a Lark grammar or a list of texts
    param: str = "response_format"  # the API's field that asked for it; errors name it

    def __post_init__(self) -> None:
        if self.kind not in get_args(FormatKind):
            kinds = ", ".join(get_args(FormatKind))
            raise RequestError(
                f"The format of an answer is of the kind {_shown(self.kind)}; it must be one of "
                f"{kinds}.",
                param=self.param,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Whether the model thinks before it answers, and for how long."""

    enabled: bool | None = None  # None: the chat template's default
    effort: str | None = None  # such as "low"; the budget follows from it if `budget` is None
    budget: int | None = None  # tokens that the thought may have; None: `effort` decides, if given

    def __post_init__(self) -> None:
        if self.enabled not in (None, True, False):
            raise RequestError(
                f"thinking is {_shown(self.enabled)}; it must be true, false or a `Thinking`.",
                hint='For an effort: Thinking(enabled=True, effort="low").',
                param="thinking",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat request: messages, tools, and what the answer must look like."""

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat | None = None  # None: any text
    thinking: Thinking = Thinking()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False  # the last message is the beginning of the answer, to be continued

    def __post_init__(self) -> None:
        if isinstance(self.messages, str) or not all(
            isinstance(message, Mapping) for message in self.messages
        ):
            raise RequestError(
                "The messages are not a list of messages.",
                hint='Write each as {"role": "user", "content": ...}.',
                param="messages",
            )
        if not isinstance(self.output_format, OutputFormat | None):
            raise RequestError(
                f"output_format is {_shown(self.output_format)}, not an `OutputFormat`.",
                hint='Give OutputFormat(kind="json_object"), or a schema.',
                param="output_format",
            )
        if self.tool_choice.mode == "required" and not self.tools:
            raise RequestError(
                "tool_choice requires a tool call, but there are no tools.",
                hint="Give tools, or leave tool_choice out.",
                param="tool_choice",
            )


def _shown(value: object) -> str:
    """Return a wrong value for an error message, cut after 40 characters."""
    return text if len(text := repr(value)) <= 40 else text[:40] + "..."
