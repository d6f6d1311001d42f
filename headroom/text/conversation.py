"""Conversation: what a client asks for in one chat call, whatever API it came through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headroom.errors import RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, with OpenAI's names of fields
FormatKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]
ChoiceMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of the arguments
    strict: bool = False  # the arguments must match the schema

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: OpenAI's object."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": {}, **self.parameters},
        }
        return {"type": "function", "function": function}


def as_tool(given: Tool | Mapping[str, Any]) -> Tool:
    """Return a tool that is given as a `Tool` or as OpenAI's object of type "function"."""
    if isinstance(given, Tool):
        return given
    function = given.get("function", given)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("A tool is not an object with a function's name.", param="tools")
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
    name: str | None = None  # with "required": the only tool, called exactly once
    parallel: bool = True  # whether one answer may have several calls


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What the text of an answer must match."""

    kind: FormatKind
    value: Any = None  # a JSON schema, a regular expression, a Lark grammar or a list of texts
    param: str = "response_format"  # the field of the API that asks for it, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Whether the model thinks before it answers, and for how long."""

    enabled: bool | None = None  # None: the chat template's default
    effort: str | None = None  # a tier such as "low", from which a budget follows
    budget: int | None = None  # most tokens of a thought; None: no limit of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One chat call: messages, tools, and what the answer must look like."""

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat | None = None  # None: any text
    thinking: Thinking = Thinking()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    # Messages that end with the assistant's own words are continued, not answered anew.
    continues: bool = False
