"""Tools that a request offers: how clients name them, and what the model is told."""

from typing import Any

import pytest

from headroom.server.offered_tools import (
    AskedChoice,
    NamedTool,
    OfferedTool,
    OfferedTools,
    read_choice,
)
from headroom.server.refusals import RefusalError
from headroom.text.conversation import Tool, ToolChoice


def offered(*names: tuple[str, str | None]) -> OfferedTools:
    tools = OfferedTools()
    for index, (name, namespace) in enumerate(names):
        tool = Tool(name=name)
        path = f"tools[{index}]"
        tools.add(
            OfferedTool(kind="function", name=name, namespace=namespace, tool=tool, path=path)
        )
    return tools


def test_tools_of_two_namespaces_may_have_one_name() -> None:
    tools = offered(("run", None), ("run", "remote"), ("stop", "remote"))
    assert [one.tool.name for one in tools.all] == ["run", "remote.run", "stop"]
    assert tools.called("remote.run").call_fields() == {"name": "run", "namespace": "remote"}
    assert tools.called("run").call_fields() == {"name": "run"}
    assert tools.model_name("run", "remote") == "remote.run"
    assert tools.model_name("gone", None) == "gone"
    assert tools.called("gone").kind == "function"


def test_a_second_tool_of_a_name_is_refused_by_its_path() -> None:
    with pytest.raises(RefusalError) as caught:
        offered(("run", "a"), ("run", "b"), ("run", "a"))
    assert caught.value.param == "tools[2].name"


@pytest.mark.parametrize("nested", [True, False])
def test_both_apis_ask_for_the_same_in_their_own_form(nested: bool) -> None:
    def entry(kind: str, name: str) -> dict[str, Any]:
        return {"type": kind, kind: {"name": name}} if nested else {"type": kind, "name": name}

    field = "tool_choice.allowed_tools" if nested else "tool_choice"
    for kind in ("function", "custom"):
        param = f"tool_choice.{kind}.name" if nested else "tool_choice.name"
        named = NamedTool(name="run", param=param)
        asked = read_choice(entry(kind, "run"), nested=nested)
        assert asked == AskedChoice(mode="required", named=named)
    listed = {"mode": "required", "tools": [{"type": "web_search"}, entry("custom", "run")]}
    value = {"type": "allowed_tools", **({"allowed_tools": listed} if nested else listed)}
    param = f"{field}.tools[1]" + (".custom.name" if nested else ".name")
    assert read_choice(value, nested=nested) == AskedChoice(
        mode="required", allowed=[NamedTool(name="run", param=param)]
    )


def test_a_choice_hides_tools_or_names_one() -> None:
    tools = offered(("run", None), ("stop", None))
    stop = NamedTool(name="stop", param="p")
    offer = tools.choose(AskedChoice(allowed=[stop]), parallel=False)
    assert [tool.name for tool in offer.tools] == ["stop"]
    assert offer.choice == ToolChoice(parallel=False)
    offer = tools.choose(AskedChoice(mode="required", named=stop), parallel=True)
    assert [tool.name for tool in offer.tools] == ["run", "stop"]
    assert offer.choice == ToolChoice(mode="required", name="stop")
    with pytest.raises(RefusalError, match="no tool 'go'; the tools are: run, stop") as caught:
        tools.choose(AskedChoice(allowed=[NamedTool(name="go", param="p")]), parallel=True)
    assert caught.value.param == "p"
    with pytest.raises(RefusalError, match="none that can be called"):
        OfferedTools().choose(AskedChoice(mode="required"), parallel=True)
