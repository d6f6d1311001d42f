"""The tools of /v1/responses: functions, custom tools, and namespaces of both."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from headroom.server.invalid_bodies import short
from headroom.server.offered_tools import LEFT_OUT, OfferedTool, OfferedTools, ToolKind
from headroom.server.openai_tools import GrammarBody, ToolName, custom_tool
from headroom.server.schemas import Body, unsupported
from headroom.text.conversation import Tool


class InputFormatBody(Body):
    """What the text of a custom tool must match."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "InputFormatBody":
        if self.type == "grammar" and (self.syntax is None or not self.definition):
            raise ValueError("a grammar needs `syntax` and `definition`")
        return self

    def grammar(self) -> GrammarBody | None:
        """Return the grammar of the text; None if it may be any text."""
        if self.syntax is None or self.definition is None or self.type == "text":
            return None
        return GrammarBody(syntax=self.syntax, definition=self.definition)


class ResponsesToolBody(Body):
    """One tool; unknown fields are kept, because the Response object shows them."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # of a function: a JSON schema
    strict: bool | None = None
    format: InputFormatBody | None = None  # of a custom tool
    # The tools of a namespace.
    tools: Annotated[list["ResponsesToolBody"], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _can_be_offered(self) -> "ResponsesToolBody":
        if self.type in ("function", "custom", "namespace"):
            if self.name is None:
                raise ValueError(f"a tool of type '{self.type}' needs a `name`")
            if self.type == "namespace" and self.tools is None:
                raise ValueError("a namespace needs `tools`")
        elif not self.type.startswith(LEFT_OUT):
            raise unsupported(
                "tools",
                f"Tools of type {short(self.type)!r} are not supported, only 'function', 'custom' "
                "and 'namespace'.",
            )
        return self

    def offered(self, namespace: str | None, path: str) -> OfferedTool:
        """Return a function or a custom tool; `path` is its field in the body."""
        assert self.name is not None
        if self.type == "custom":
            grammar = self.format.grammar() if self.format is not None else None
            tool = custom_tool(self.name, self.description, grammar, f"{path}.format")
        else:
            tool = Tool(
                name=self.name,
                description=self.description or "",
                parameters=self.parameters or {},
                strict=bool(self.strict),
                param=f"{path}.parameters",
            )
        kind: ToolKind = "custom" if self.type == "custom" else "function"
        return OfferedTool(kind=kind, name=self.name, namespace=namespace, tool=tool, path=path)

    def shown(self) -> dict[str, Any]:
        """Return the tool as the Response object shows it."""
        shown = self.model_dump(exclude_unset=True)
        if self.type == "function":
            return {**shown, "parameters": self.parameters, "strict": bool(self.strict)}
        if self.type == "custom":
            return {**shown, "format": shown.get("format") or {"type": "text"}}
        if self.tools is not None:
            shown["tools"] = [tool.shown() for tool in self.tools]
        return shown


def offered_tools(
    bodies: Iterable[ResponsesToolBody],
    later: Iterable[ResponsesToolBody] = (),  # tools of items; those that are known are skipped
) -> OfferedTools:
    """Return the tools that may be called."""
    offered = OfferedTools()
    for tool in _flat(bodies):
        offered.add(tool)
    for tool in _flat(later):
        if not offered.knows(tool.name, tool.namespace):
            offered.add(tool)
    return offered


def _flat(bodies: Iterable[ResponsesToolBody]) -> Iterator[OfferedTool]:
    """Yield the tools that can be called, each with its namespace."""
    for index, body in enumerate(bodies):
        path = f"tools[{index}]"
        if body.type == "namespace":
            for place, inner in enumerate(body.tools or ()):
                if inner.type in ("function", "custom"):
                    yield inner.offered(body.name, f"{path}.tools[{place}]")
        elif body.type in ("function", "custom"):
            yield body.offered(None, path)
