"""The fields of OpenAI's chat bodies about tools: tools, earlier calls, and the choice of a tool.

The older fields `functions` and `function_call` are read as tools; only one call may come then.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, model_validator

from headroom.server.offered_tools import (
    AskedChoice,
    NamedTool,
    OfferedTool,
    OfferedTools,
    ToolOffer,
    read_choice,
)
from headroom.server.schemas import Body, invalid
from headroom.text.conversation import INPUT, Tool, text_tool

NonEmpty = Annotated[str, Field(min_length=1)]
# OpenAI allows letters, digits, "_" and "-"; the tools of MCP servers have other characters, too.
ToolName = Annotated[str, StringConstraints(pattern=r"^[\w.:/-]{1,128}$")]
MAX_TOOLS = 1024  # in one request; OpenAI allows 128


class FunctionBody(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: the function has no arguments
    strict: bool | None = None

    def tool(self, path: str) -> Tool:
        """Return the function as a `Tool`; `path` is its field in the body."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or {},
            strict=bool(self.strict),
            param=f"{path}.parameters",
        )


class GrammarBody(Body):
    """What the text of a custom tool must match."""

    syntax: Literal["lark", "regex"]
    definition: NonEmpty


class CustomFormatBody(Body):
    """The format of a custom tool's text, as in chats."""

    type: Literal["text", "grammar"]
    grammar: GrammarBody | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "CustomFormatBody":
        if self.type == "grammar" and self.grammar is None:
            raise ValueError("a format of type 'grammar' needs `grammar`")
        return self


class CustomBody(Body):
    """A tool that the model calls with plain text."""

    name: ToolName
    description: str | None = None
    format: CustomFormatBody | None = None

    def tool(self, path: str) -> Tool:
        """Return the function that stands for the tool; `path` is its field in the body."""
        grammar = self.format.grammar if self.format is not None else None
        return custom_tool(self.name, self.description, grammar, f"{path}.format")


def custom_tool(
    name: str, description: str | None, grammar: GrammarBody | None, param: str
) -> Tool:
    """Return the function that stands for a custom tool; `param` is the field of its format."""
    regex = grammar.definition if grammar is not None and grammar.syntax == "regex" else ""
    lark = grammar.definition if grammar is not None and grammar.syntax == "lark" else ""
    return text_tool(name, description or "", regex=regex, lark=lark, param=param)


class ToolBody(Body):
    """A tool that is a function."""

    # A tool of the type "custom" becomes a CustomToolBody; an error names both types.
    type: Literal["function", "custom"] = "function"
    function: FunctionBody

    def offered(self, path: str) -> OfferedTool:
        """Return the tool; `path` is its field in the body."""
        where = f"{path}.function"
        tool = self.function.tool(where)
        return OfferedTool(kind="function", name=tool.name, tool=tool, path=where)


class CustomToolBody(Body):
    """A custom tool: it is called with plain text."""

    type: Literal["custom"]
    custom: CustomBody

    def offered(self, path: str) -> OfferedTool:
        """Return the tool; `path` is its field in the body."""
        where = f"{path}.custom"
        tool = self.custom.tool(where)
        return OfferedTool(kind="custom", name=tool.name, tool=tool, path=where)


def _is_custom(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "custom"


def _read_tool(value: object) -> ToolBody | CustomToolBody:
    return (CustomToolBody if _is_custom(value) else ToolBody).model_validate(value)


def arguments_text(value: object) -> object:
    """Return the arguments of an earlier call as JSON text; clients send objects and null, too."""
    if value is None:
        return "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


def _known_id(value: object) -> object:
    return "" if value is None else value


# The id of an earlier call; "" if the client sent none.
CallId = Annotated[str, BeforeValidator(_known_id)]


class CalledFunctionBody(Body):
    """The function and the arguments of a call that an assistant made earlier."""

    name: ToolName
    arguments: Annotated[str, BeforeValidator(arguments_text)] = ""  # JSON


class CalledCustomBody(Body):
    """The custom tool and the text of a call that an assistant made earlier."""

    name: ToolName
    input: str = ""


class ToolCallBody(Body):
    """A call of a function that an assistant made earlier."""

    id: CallId = ""
    type: Literal["function"] | None = None
    function: CalledFunctionBody

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        return {"id": self.id, "type": "function", "function": self.function.model_dump()}


class CustomToolCallBody(Body):
    """A call of a custom tool that an assistant made earlier."""

    id: CallId = ""
    type: Literal["custom"]
    custom: CalledCustomBody

    def for_template(self) -> dict[str, Any]:
        """Return the call of the function that stands for the tool."""
        arguments = json.dumps({INPUT: self.custom.input}, ensure_ascii=False)
        function = CalledFunctionBody(name=self.custom.name, arguments=arguments)
        return ToolCallBody(id=self.id, function=function).for_template()


def _read_call(value: object) -> ToolCallBody | CustomToolCallBody:
    return (CustomToolCallBody if _is_custom(value) else ToolCallBody).model_validate(value)


ChatTool = Annotated[ToolBody | CustomToolBody, PlainValidator(_read_tool)]
ChatToolCall = Annotated[ToolCallBody | CustomToolCallBody, PlainValidator(_read_call)]


class ToolFields(Body):
    """The fields that say what the model may, must or must not call."""

    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    function_call: Any = None

    @property
    def calls_functions(self) -> bool:
        """Whether calls are written in the older form, as `function_call`."""
        return bool(self.functions)

    def offered_tools(self) -> OfferedTools:
        """Return the tools that may be called."""
        if self.tools and self.functions:
            raise invalid("functions", "`functions` is an older name of `tools`; leave one out.")
        offered = OfferedTools()
        for index, body in enumerate(self.tools or ()):
            offered.add(body.offered(f"tools[{index}]"))
        for index, function in enumerate(self.functions or ()):
            tool = function.tool(path := f"functions[{index}]")
            offered.add(OfferedTool(kind="function", name=tool.name, tool=tool, path=path))
        return offered

    def tool_offer(self, offered: OfferedTools) -> ToolOffer:
        """Return the tools that the model sees, and whether it must call one."""
        if self.functions:
            return offered.choose(_function_choice(self.function_call), parallel=False)
        if self.function_call not in (None, "auto", "none"):
            raise invalid("function_call", "`function_call` needs `functions`.")
        return offered.choose(
            read_choice(self.tool_choice, nested=True),
            parallel=self.parallel_tool_calls is not False,
        )


def _function_choice(value: object) -> AskedChoice:
    """Return the choice that the older field `function_call` makes."""
    if value is None or value == "auto":
        return AskedChoice()
    if value == "none":
        return AskedChoice(mode="none")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise invalid(
            "function_call", "`function_call` must be 'auto', 'none' or an object with a `name`."
        )
    return AskedChoice(mode="required", named=NamedTool(name=name, param="function_call.name"))
