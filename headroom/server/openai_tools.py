"""Tools in OpenAI's chat bodies: what may be called, what was called, and which call is asked for.

The older fields `functions` and `function_call` are read as tools, of which one may be called.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from headroom.server.schemas import Body, invalid, short
from headroom.text.conversation import Tool, ToolChoice

NonEmpty = Annotated[str, Field(min_length=1)]
# OpenAI takes letters, digits, "_" and "-"; names of tools of MCP servers have more.
ToolName = Annotated[str, StringConstraints(pattern=r"^[\w.:/-]{1,128}$")]
MAX_TOOLS = 1024  # in one request; OpenAI takes 128


class FunctionBody(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; left out: the function takes nothing
    strict: bool | None = None

    def tool(self) -> Tool:
        """Return the function as chat templates and parsers know it."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or {},
            strict=bool(self.strict),
        )


class ToolBody(Body):
    """A tool of a chat: always a function."""

    type: Literal["function"] = "function"
    function: FunctionBody


class CalledFunctionBody(Body):
    """The function and the arguments of a call that an assistant made earlier."""

    name: ToolName
    arguments: str = ""  # JSON


class ToolCallBody(Body):
    """A call that an assistant made earlier."""

    id: NonEmpty
    type: Literal["function"] = "function"
    function: CalledFunctionBody


class ToolFields(Body):
    """The fields that say what the model may, must or must not call."""

    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
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

    def offered_tools(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Return the tools that may be called, and whether one must be."""
        if self.tools and self.functions:
            raise invalid("functions", "`functions` is an older name of `tools`; give one.")
        field = "functions" if self.functions else "tools"
        bodies = self.functions or [tool.function for tool in self.tools or ()]
        tools = tuple(body.tool() for body in bodies)
        seen: set[str] = set()
        for index, tool in enumerate(tools):
            if tool.name in seen:
                where = f"{field}[{index}]" + (".function" if field == "tools" else "") + ".name"
                raise invalid(where, f"Two tools have the name {short(tool.name)!r}.")
            seen.add(tool.name)
        if self.functions:
            choice = _function_choice(self.function_call, tools)
            return tools, replace(choice, parallel=False)
        parallel = self.parallel_tool_calls is not False
        if self.function_call not in (None, "auto", "none"):
            raise invalid("function_call", "`function_call` needs `functions`.")
        tools, choice = _tool_choice(self.tool_choice, tools)
        return tools, replace(choice, parallel=parallel)


def _tool_choice(value: object, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that may be called and the choice that `tool_choice` makes of them."""
    if value is None or value == "auto":
        return tools, ToolChoice()
    if value == "none":
        return tools, ToolChoice(mode="none")
    if not tools:
        raise invalid("tool_choice", f"`tool_choice` is {short(value)!r} and there are no `tools`.")
    if value == "required":
        return tools, ToolChoice(mode="required")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        name = _function_name(value, "tool_choice")
        _find(name, tools, "tool_choice.function.name")
        return tools, ToolChoice(mode="required", name=name)
    if kind == "allowed_tools":
        return _allowed_tools(value, tools)
    raise invalid(
        "tool_choice",
        "`tool_choice` must be 'auto', 'none', 'required', or an object of type 'function' or "
        "'allowed_tools'.",
    )


def _allowed_tools(value: Any, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the list names; the model is not told of the others."""
    field = "tool_choice.allowed_tools"
    allowed = value.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise invalid(field, f"`{field}` must be an object with `mode` and a list of `tools`.")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise invalid(f"{field}.mode", f"`{field}.mode` must be 'auto' or 'required'.")
    names = [
        _function_name(entry, f"{field}.tools[{index}]")
        for index, entry in enumerate(allowed["tools"])
    ]
    if not names:
        raise invalid(f"{field}.tools", f"`{field}.tools` names no tool.")
    known = {tool.name for tool in tools}
    for index, name in enumerate(names):
        if name not in known:
            _find(name, tools, f"{field}.tools[{index}].function.name")
    chosen = set(names)
    return tuple(tool for tool in tools if tool.name in chosen), ToolChoice(mode=mode)


def _function_choice(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice that the older field `function_call` makes."""
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice(mode="none")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise invalid(
            "function_call", "`function_call` must be 'auto', 'none' or an object with a `name`."
        )
    _find(name, tools, "function_call.name")
    return ToolChoice(mode="required", name=name)


def _function_name(value: Any, field: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"{field}.function.name", f"`{field}.function.name` must be a text.")
    return name


def _find(name: str, tools: Sequence[Tool], field: str) -> None:
    names = [tool.name for tool in tools]
    if name not in names:
        known = short(", ".join(names))
        raise invalid(field, f"There is no tool {short(name)!r}; the tools are: {known}.")
