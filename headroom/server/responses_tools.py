"""Tools of /v1/responses: which the model is told of, and how its calls are written for the client.

The model knows functions only. A custom tool, which takes plain text, is shown to it as a function
with one text argument. A tool of a namespace is shown under its own name, or with the namespace in
front where two tools have one name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from headroom.server.openai_tools import ToolName
from headroom.server.refusals import RefusalError
from headroom.server.schemas import Body, invalid, short, unsupported
from headroom.text.conversation import Tool, ToolChoice

INPUT = "input"  # the only argument of a custom tool's function
# Tools that run on OpenAI's servers, and that agents send with every request: the model is not
# told of them. Their types may end with a date.
LEFT_OUT = ("web_search", "image_generation", "tool_search")


class InputFormatBody(Body):
    """What the text of a custom tool must look like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "InputFormatBody":
        if self.type == "grammar" and (self.syntax is None or not self.definition):
            raise ValueError("a grammar needs `syntax` and `definition`")
        return self


class ResponsesToolBody(Body):
    """One tool; fields that only clients read are kept, because the response repeats them."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # of a function: a JSON schema
    strict: bool | None = None
    format: InputFormatBody | None = None  # of a custom tool
    # Those of a namespace.
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
                f"Tools of type {short(self.type)!r} cannot be called; "
                "this server has 'function', 'custom' and 'namespace'.",
            )
        return self

    def shown(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        shown = self.model_dump(exclude_unset=True)
        if self.type == "function":
            return {**shown, "parameters": self.parameters, "strict": bool(self.strict)}
        if self.type == "custom":
            return {**shown, "format": shown.get("format") or {"type": "text"}}
        if self.tools is not None:
            shown["tools"] = [tool.shown() for tool in self.tools]
        return shown


ToolKind = Literal["function", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool that may be called: as the client knows it, and as the model is told of it."""

    kind: ToolKind
    name: str
    namespace: str | None
    tool: Tool

    def call_fields(self) -> dict[str, str]:
        """Return the fields of a call's item that say what is called."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **namespace}


class OfferedTools:
    """All tools of one request that may be called."""

    def __init__(
        self,
        bodies: Iterable[ResponsesToolBody],
        later: Iterable[ResponsesToolBody] = (),  # may repeat tools, which changes nothing
    ) -> None:
        self.all: list[OfferedTool] = []
        for namespace, body in _flat(bodies):
            if self._knows(namespace, body.name):
                raise invalid("tools", f"Two tools have the name {short(body.name)!r}.")
            self._offer(namespace, body)
        for namespace, body in _flat(later):
            if not self._knows(namespace, body.name):
                self._offer(namespace, body)

    def _knows(self, namespace: str | None, name: str | None) -> bool:
        return any((known.namespace, known.name) == (namespace, name) for known in self.all)

    def _offer(self, namespace: str | None, body: ResponsesToolBody) -> None:
        tool = _custom_tool(body) if body.type == "custom" else _function_tool(body)
        taken = {known.tool.name for known in self.all}
        if tool.name in taken and namespace is not None:
            tool = replace(tool, name=f"{namespace}.{tool.name}")
        kind: ToolKind = "custom" if body.type == "custom" else "function"
        assert body.name is not None
        self.all.append(OfferedTool(kind=kind, name=body.name, namespace=namespace, tool=tool))

    def called(self, name: str) -> OfferedTool:
        """Return the tool that the model calls by this name."""
        for offered in self.all:
            if offered.tool.name == name:
                return offered
        return OfferedTool(kind="function", name=name, namespace=None, tool=Tool(name=name))

    def model_name(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool that was called earlier."""
        for offered in self.all:
            if (offered.name, offered.namespace) == (name, namespace):
                return offered.tool.name
        return name

    def choose(self, choice: object, *, parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Return the tools that the model is told of, and whether it must call one."""
        tools = tuple(offered.tool for offered in self.all)
        if choice is None or choice == "auto":
            return tools, ToolChoice(parallel=parallel)
        if choice == "none":
            return tools, ToolChoice(mode="none", parallel=parallel)
        if not tools:
            raise _bad_choice(f"`tool_choice` is {short(choice)!r}, and no tool can be called.")
        if choice == "required":
            return tools, ToolChoice(mode="required", parallel=parallel)
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind in ("function", "custom"):
            name = self._find(choice).tool.name
            return tools, ToolChoice(mode="required", name=name, parallel=parallel)
        if kind == "allowed_tools":
            return self._choose_allowed(choice, parallel=parallel)
        raise _bad_choice(
            "`tool_choice` must be 'auto', 'none', 'required', or an object of type 'function', "
            "'custom' or 'allowed_tools'."
        )

    def _choose_allowed(
        self, choice: Any, *, parallel: bool
    ) -> tuple[tuple[Tool, ...], ToolChoice]:
        mode, entries = choice.get("mode", "auto"), choice.get("tools")
        if mode not in ("auto", "required"):
            raise _bad_choice("`mode` must be 'auto' or 'required'.", "tool_choice.mode")
        if not isinstance(entries, list) or not entries:
            raise _bad_choice("`tools` must be a list of tools.", "tool_choice.tools")
        # Tools that run on a server are left out here as in `tools`.
        kinds = [str(entry.get("type")) if isinstance(entry, dict) else "" for entry in entries]
        allowed = [
            self._find(entry, f"tool_choice.tools[{index}].name").tool
            for index, (kind, entry) in enumerate(zip(kinds, entries, strict=True))
            if not kind.startswith(LEFT_OUT)
        ]
        if not allowed and mode == "required":
            raise _bad_choice("None of `tools` can be called.", "tool_choice.tools")
        return tuple(allowed), ToolChoice(mode=mode, parallel=parallel)

    def _find(self, wanted: Any, param: str = "tool_choice.name") -> OfferedTool:
        name = wanted.get("name") if isinstance(wanted, dict) else None
        namespace = wanted.get("namespace") if isinstance(wanted, dict) else None
        if not isinstance(name, str):
            raise _bad_choice("`name` must be a text.", param)
        for offered in self.all:
            if offered.name == name and namespace in (None, offered.namespace):
                return offered
        known = short(", ".join(offered.name for offered in self.all))
        raise _bad_choice(f"There is no tool {short(name)!r}; the tools are: {known}.", param)


def _flat(bodies: Iterable[ResponsesToolBody]) -> Iterable[tuple[str | None, ResponsesToolBody]]:
    """Yield the tools that can be called, each with its namespace."""
    for body in bodies:
        if body.type == "namespace":
            inner: Sequence[ResponsesToolBody] = body.tools or ()
            yield from ((body.name, tool) for tool in inner if tool.type in ("function", "custom"))
        elif body.type in ("function", "custom"):
            yield None, body


def _function_tool(body: ResponsesToolBody) -> Tool:
    assert body.name is not None
    return Tool(
        name=body.name,
        description=body.description or "",
        parameters=body.parameters or {},
        strict=bool(body.strict),
    )


def _custom_tool(body: ResponsesToolBody) -> Tool:
    """Return a function with one text argument that stands for a custom tool."""
    assert body.name is not None
    description = body.description or ""
    text: dict[str, Any] = {"type": "string", "description": "The whole input of the tool."}
    strict = False
    if body.format is not None and body.format.type == "grammar":
        if body.format.syntax == "regex":
            text["pattern"] = f"^(?:{body.format.definition})$"
            strict = True
        else:
            note = f"The input must match this Lark grammar:\n{body.format.definition}"
            description = f"{description}\n\n{note}".lstrip()
    return Tool(
        name=body.name,
        description=description,
        parameters={
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
        strict=strict,
    )


def _bad_choice(message: str, param: str = "tool_choice") -> RefusalError:
    return invalid(param, message)
