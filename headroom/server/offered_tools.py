"""The tools of a request: as the client names them, and as the model sees them.

The model sees functions only. A custom tool, which takes plain text, is shown to it as a function
with one text argument. A tool in a namespace is shown by its own name; if two tools have the same
name, the second one is shown with its namespace in front.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headroom.server.invalid_bodies import short
from headroom.server.schemas import invalid
from headroom.text.conversation import ChoiceMode, Tool, ToolChoice

# Tools that run on OpenAI's servers and that agents send with every request. The model does not see
# them. Their types may end with a date.
LEFT_OUT = ("web_search", "image_generation", "tool_search")
ToolKind = Literal["function", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool that may be called."""

    kind: ToolKind
    name: str
    namespace: str | None = None
    tool: Tool  # as the model sees it
    path: str = "tools"  # the field of the body that has its name

    def call_fields(self) -> dict[str, str]:
        """Return the fields of a call's item that name the tool."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **namespace}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTool:
    """A tool that `tool_choice` names."""

    name: str
    namespace: str | None = None
    param: str  # the field that names it


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChoice:
    """What `tool_choice` asks for."""

    mode: ChoiceMode = "auto"
    named: NamedTool | None = None  # with "required": the only tool that may be called
    allowed: Sequence[NamedTool] | None = None  # the model sees only these; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """The tools that the model sees, and whether it must call one."""

    tools: tuple[Tool, ...]
    choice: ToolChoice


class OfferedTools:
    """All tools of one request that may be called."""

    def __init__(self) -> None:
        self.all: list[OfferedTool] = []

    def add(self, offered: OfferedTool) -> None:
        """Offer a tool; refuse a second one of the same name."""
        if self.knows(offered.name, offered.namespace):
            raise invalid(
                f"{offered.path}.name", f"Two tools have the name {short(offered.name)!r}."
            )
        taken = {known.tool.name for known in self.all}
        if offered.tool.name in taken and offered.namespace is not None:
            name = f"{offered.namespace}.{offered.tool.name}"
            offered = replace(offered, tool=replace(offered.tool, name=name))
        self.all.append(offered)

    def knows(self, name: str, namespace: str | None = None) -> bool:
        """Whether there is a tool of this name."""
        return any((known.name, known.namespace) == (name, namespace) for known in self.all)

    def called(self, name: str) -> OfferedTool:
        """Return the tool that the model calls by this name."""
        for offered in self.all:
            if offered.tool.name == name:
                return offered
        return OfferedTool(kind="function", name=name, tool=Tool(name=name))

    def model_name(self, name: str, namespace: str | None) -> str:
        """Return the name by which the model knows a tool that was called earlier."""
        for offered in self.all:
            if (offered.name, offered.namespace) == (name, namespace):
                return offered.tool.name
        return name

    def choose(self, asked: AskedChoice, *, parallel: bool) -> ToolOffer:
        """Return the tools that the model sees, and whether it must call one."""
        if not self.all and (asked.mode == "required" or asked.allowed is not None):
            raise invalid(
                "tool_choice",
                "`tool_choice` requires a tool, but the request has none that can be called.",
            )
        chosen = self.all if asked.allowed is None else [self.find(one) for one in asked.allowed]
        name = None if asked.named is None else self.find(asked.named).tool.name
        return ToolOffer(
            tools=tuple(offered.tool for offered in self.all if offered in chosen),
            choice=ToolChoice(mode=asked.mode, name=name, parallel=parallel),
        )

    def find(self, wanted: NamedTool) -> OfferedTool:
        """Return the tool that a client names; refuse a name that no tool has."""
        for offered in self.all:
            if offered.name == wanted.name and wanted.namespace in (None, offered.namespace):
                return offered
        known = short(", ".join(offered.name for offered in self.all))
        raise invalid(
            wanted.param, f"There is no tool {short(wanted.name)!r}; the tools are: {known}."
        )


def read_choice(
    value: object,  # `tool_choice` of a body
    *,
    nested: bool,  # as in chats, the name is in an object: {"function": {"name": ...}}
) -> AskedChoice:
    """Return what `tool_choice` asks for."""
    if value is None or value == "auto":
        return AskedChoice()
    if value == "none":
        return AskedChoice(mode="none")
    if value in ("required", "any"):  # "any" is Mistral's word
        return AskedChoice(mode="required")
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return AskedChoice(mode="required", named=_named_tool(value, "tool_choice", nested=nested))
    if kind == "allowed_tools":
        return _allowed_tools(value, nested=nested)
    raise invalid(
        "tool_choice",
        "`tool_choice` must be 'auto', 'none', 'required', or an object of type 'function', "
        "'custom' or 'allowed_tools'.",
    )


def _allowed_tools(value: Any, *, nested: bool) -> AskedChoice:
    field = "tool_choice.allowed_tools" if nested else "tool_choice"
    allowed = value.get("allowed_tools") if nested else value
    if not isinstance(allowed, dict):
        raise invalid(field, f"`{field}` must be an object with `mode` and a list of `tools`.")
    mode, entries = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{field}.mode", f"`{field}.mode` must be 'auto' or 'required'.")
    if not isinstance(entries, list) or not entries:
        raise invalid(f"{field}.tools", f"`{field}.tools` must be a list that names tools.")
    named = [
        _named_tool(entry, f"{field}.tools[{index}]", nested=nested)
        for index, entry in enumerate(entries)
        if not _is_left_out(entry)
    ]
    if not named and mode == "required":
        raise invalid(f"{field}.tools", f"None of `{field}.tools` can be called.")
    return AskedChoice(mode=mode, allowed=named)


def _is_left_out(entry: Any) -> bool:
    return isinstance(entry, dict) and str(entry.get("type")).startswith(LEFT_OUT)


def _named_tool(entry: Any, field: str, *, nested: bool) -> NamedTool:
    kind = entry.get("type") if isinstance(entry, dict) else None
    if nested:
        field = f"{field}.{'custom' if kind == 'custom' else 'function'}"
        entry = entry.get(kind or "function") if isinstance(entry, dict) else None
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise invalid(f"{field}.name", f"`{field}.name` must be a text.")
    return NamedTool(name=name, namespace=entry.get("namespace"), param=f"{field}.name")
