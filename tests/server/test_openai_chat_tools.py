"""Tool calls and thoughts in /v1/chat/completions, read by the official client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionMessageCustomToolCall,
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceCustomParam,
)
from pydantic import BaseModel

from headroom.options import Options
from headroom.text.conversation import OutputFormat, Thinking, Tool, ToolChoice
from tests.server.fakes import FakeLLM, serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "description": "Now."}},
]
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Paris?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.fixture
def official(llm: FakeLLM) -> Iterator[OpenAI]:
    with (
        serving(llm, Options(port=0)) as server,
        OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_call_comes_with_id_name_and_arguments(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = CALL
    answer = official.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    assert llm.chats[0].tools == (
        Tool(name="weather", parameters=SCHEMA),
        Tool(name="time", description="Now."),
    )


def test_text_before_calls_and_several_calls_are_kept(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = f"Let me look.\n{CALL}\n{TIME}"
    answer = official.chat.completions.create(model="fake", messages=ASKED, tools=TOOLS)
    message = answer.choices[0].message
    assert (message.content or "").strip() == "Let me look."
    calls = [call.function.name for call in message.tool_calls or [] if call.type == "function"]
    assert calls == ["weather", "time"]
    assert len({call.id for call in message.tool_calls or []}) == 2


def test_streamed_calls_begin_with_id_and_name_and_arguments_follow_in_pieces(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.words = f"Well. {CALL}{TIME}"
    body = {"messages": ASKED, "tools": TOOLS, "stream": True}
    lines = client.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert lines[-2] == "data: [DONE]"
    pieces: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in chunks:
        calls = chunk["choices"][0]["delta"].get("tool_calls", ())
        assert len(calls) < 2  # clients read only the first
        for call in calls:
            pieces[call["index"]].append(call)
    for index, name in ((0, "weather"), (1, "time")):
        first, *rest = pieces[index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"]["name"] == name
        assert all(set(piece) == {"index", "function"} for piece in rest)
        assert all(set(piece["function"]) == {"arguments"} for piece in rest)
    assert len(pieces[0]) > 3
    arguments = "".join(piece["function"]["arguments"] for piece in pieces[0])
    assert json.loads(arguments) == {"city": "Paris", "days": 2}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_the_clients_accumulator_gives_the_calls_of_the_whole_answer(
    official: OpenAI, llm: FakeLLM
) -> None:
    llm.engine.words = f"<think>Hm.</think>Well. {CALL}{TIME}"
    llm.thinks = True
    settings: dict[str, Any] = {"model": "fake", "messages": ASKED, "tools": TOOLS}
    with official.chat.completions.stream(**settings) as stream:
        done = [
            event.name for event in stream if event.type == "tool_calls.function.arguments.done"
        ]
        streamed = stream.get_final_completion().choices[0]
    whole = official.chat.completions.create(**settings).choices[0]
    assert done == ["weather", "time"]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert streamed.message.content == whole.message.content
    assert _calls(streamed.message) == _calls(whole.message)
    assert whole.message.model_extra == {"reasoning_content": "Hm."}


def _calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_content(official: OpenAI, llm: FakeLLM, stream: bool) -> None:
    llm.engine.words = f"<think>Hm.</think>\n\nLet me look.\n{CALL}\n"
    llm.thinks = True
    settings: Any = {"model": "fake", "messages": ASKED, "tools": TOOLS, "logprobs": True}
    answer: Any = official.chat.completions.create(**settings, stream=stream)
    parts = [
        choice.logprobs for chunk in (answer if stream else [answer]) for choice in chunk.choices
    ]
    tokens = [entry.token for part in parts if part is not None for entry in part.content or ()]
    assert "".join(tokens) == "Let me look."


def test_a_tool_is_called_and_its_result_is_answered(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = f"<think>I must look.</think>{CALL}"
    llm.thinks = True
    history: list[Any] = list(ASKED)
    first = official.chat.completions.create(model="fake", messages=history, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    history.append(message)
    history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."})
    llm.engine.words = "It is sunny."
    second = official.chat.completions.create(model="fake", messages=history, tools=TOOLS)
    assert second.choices[0].message.content == "It is sunny."
    assert second.choices[0].finish_reason == "stop"
    call = message.tool_calls[0]
    assert call.type == "function"
    function = {"name": "weather", "arguments": call.function.arguments}
    assert llm.conversations[1] == [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I must look.",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Sunny.", "tool_call_id": call.id},
    ]


def test_without_tools_or_with_the_choice_none_a_call_is_text(
    official: OpenAI, llm: FakeLLM
) -> None:
    llm.engine.words = CALL
    plain = official.chat.completions.create(model="fake", messages=ASKED)
    none = official.chat.completions.create(
        model="fake", messages=ASKED, tools=TOOLS, tool_choice="none"
    )
    for answer in (plain, none):
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].finish_reason == "stop"
    assert llm.chats[1].tool_choice == ToolChoice(mode="none")


def test_a_call_that_the_length_cuts_off_ends_with_length(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = CALL
    answer = official.chat.completions.create(
        model="fake", messages=ASKED, tools=TOOLS, max_completion_tokens=50
    )
    assert answer.choices[0].finish_reason == "length"


def test_choices_of_tools_reach_the_model(official: OpenAI, llm: FakeLLM) -> None:
    official.chat.completions.create(
        model="fake",
        messages=ASKED,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "time"}},
        parallel_tool_calls=False,
    )
    chosen = ToolChoice(mode="required", name="time", parallel=False)
    assert llm.chats[0].tool_choice == chosen


class City(BaseModel):
    name: str
    people: int


def test_parse_gives_the_clients_own_class(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = '{"name": "Paris", "people": 2100000}'
    answer = official.chat.completions.parse(model="fake", messages=ASKED, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Paris", people=2_100_000)
    asked = llm.chats[0].output_format
    assert asked is not None
    assert asked.kind == "json_schema"
    assert set(asked.value["properties"]) == {"name", "people"}
    with official.chat.completions.stream(
        model="fake", messages=ASKED, response_format=City
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(
            name="Paris", people=2_100_000
        )


def test_parse_reads_the_arguments_of_strict_tools(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = '<tool_call>{"name": "City", "arguments": {"name": "Rome", "people": 3}}'
    llm.engine.words += "</tool_call>"
    answer = official.chat.completions.parse(
        model="fake", messages=ASKED, tools=[openai.pydantic_function_tool(City)]
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == City(name="Rome", people=3)
    assert llm.chats[0].tools[0].strict


def test_a_json_object_can_be_asked_for(official: OpenAI, llm: FakeLLM) -> None:
    official.chat.completions.create(
        model="fake", messages=ASKED, response_format={"type": "json_object"}
    )
    assert (llm.chats[0].output_format or OutputFormat(kind="regex")).kind == "json_object"


def test_thoughts_are_apart_from_the_text_and_counted(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words, llm.thinks = "<think>Two and two.</think>Four.", True
    answer = official.chat.completions.create(model="fake", messages=ASKED, reasoning_effort="low")
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "Two and two.")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    # The fake's tokens are bytes: the last one of the start mark is the first that counts.
    counted = len(">Two and two.</think>")
    assert answer.usage.completion_tokens_details.reasoning_tokens == counted
    assert llm.chats[0].thinking == Thinking(enabled=True, effort="low")
    chunks = list(official.chat.completions.create(model="fake", messages=ASKED, stream=True))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert "".join(thoughts) == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_logprobs_are_those_of_the_text_and_not_of_the_thought(
    official: OpenAI, llm: FakeLLM
) -> None:
    llm.engine.words, llm.thinks = "<think>Two and two.</think>Four.", True
    settings: dict[str, Any] = {"model": "fake", "messages": ASKED, "logprobs": True}
    choice = official.chat.completions.create(**settings).choices[0]
    assert choice.logprobs is not None
    spelled = "".join(entry.token for entry in choice.logprobs.content or [])
    assert spelled.removeprefix("<think") == "Four."  # the fake spells the mark in bytes
    chunks = official.chat.completions.create(**settings, stream=True)
    entries = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert "".join(entries) == spelled


def test_thoughts_can_be_left_out(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words, llm.thinks = "<think>Two and two.</think>Four.", True
    hidden: dict[str, Any] = {"reasoning": {"exclude": True}}
    message = (
        official.chat.completions.create(model="fake", messages=ASKED, extra_body=hidden)
        .choices[0]
        .message
    )
    assert (message.content, message.model_extra) == ("Four.", {})
    chunks = official.chat.completions.create(
        model="fake", messages=ASKED, extra_body=hidden, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert all("reasoning_content" not in (delta.model_extra or {}) for delta in deltas)
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_variables_reach_the_template(official: OpenAI, llm: FakeLLM) -> None:
    variables = {"enable_thinking": False, "style": "brief"}
    official.chat.completions.create(
        model="fake", messages=ASKED, extra_body={"chat_template_kwargs": variables}
    )
    assert llm.chats[0].template_variables == variables
    assert llm.chats[0].thinking == Thinking(enabled=False)


def test_older_functions_are_answered_in_their_own_form(official: OpenAI, llm: FakeLLM) -> None:
    llm.engine.words = CALL
    functions: Any = [tool["function"] for tool in TOOLS]
    settings: dict[str, Any] = {"model": "fake", "messages": ASKED, "functions": functions}
    answer = official.chat.completions.create(**settings)
    (choice,) = answer.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris", "days": 2}
    chunks = list(official.chat.completions.create(**settings, stream=True))
    calls = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join(call.name or "" for call in calls if call) == "weather"
    streamed = "".join(call.arguments or "" for call in calls if call)
    assert streamed == choice.message.function_call.arguments
    assert chunks[-1].choices[0].finish_reason == "function_call"
    history: list[Any] = [
        *ASKED,
        choice.message,
        {"role": "function", "name": "weather", "content": "Sunny."},
    ]
    official.chat.completions.create(model="fake", messages=history, functions=functions)
    asked, called, result = llm.conversations[-1]
    assert asked["role"] == "user"
    (call,) = called["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert (result["role"], result["tool_call_id"]) == ("tool", call["id"])


SHELL: Any = {
    "type": "custom",
    "custom": {
        "name": "shell",
        "description": "Runs a command.",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "lark", "definition": 'start: "ls " /[^\\n]+/'},
        },
    },
}
COMMAND = 'ls "a\\b" é 👍\t'
CUSTOM_CALL = f"""<tool_call>
{json.dumps({"name": "shell", "arguments": {"input": COMMAND}}, ensure_ascii=False)}
</tool_call>"""


def test_a_custom_tool_is_called_with_plain_text_and_its_result_is_answered(
    official: OpenAI, llm: FakeLLM
) -> None:
    llm.engine.words = f"{CUSTOM_CALL}\n{TIME}"
    tools: Any = [*TOOLS, SHELL]
    answer = official.chat.completions.create(model="fake", messages=ASKED, tools=tools)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call, other = choice.message.tool_calls
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "shell", COMMAND)
    assert other.type == "function"
    (told,) = (tool for tool in llm.chats[0].tools if tool.name == "shell")
    assert told.strict
    assert told.grammar == SHELL["custom"]["format"]["grammar"]["definition"]
    assert told.grammar in told.description
    history: list[Any] = [
        *ASKED,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a.txt"},
        {"role": "tool", "tool_call_id": other.id, "content": "noon"},
    ]
    official.chat.completions.create(model="fake", messages=history, tools=tools)
    first = llm.conversations[-1][1]["tool_calls"][0]
    assert (first["id"], first["type"]) == (call.id, "function")
    assert first["function"]["name"] == "shell"
    assert json.loads(first["function"]["arguments"]) == {"input": COMMAND}


@pytest.mark.parametrize("input_key", ["input", "command"])
def test_the_text_of_a_custom_tool_is_streamed_in_pieces(
    official: OpenAI, llm: FakeLLM, input_key: str
) -> None:
    llm.engine.words = CUSTOM_CALL.replace('"input"', f'"{input_key}"')
    settings: Any = {"model": "fake", "messages": ASKED, "tools": [SHELL]}
    whole = official.chat.completions.create(**settings).choices[0].message.tool_calls
    assert whole is not None
    assert whole[0].type == "custom"
    pieces: list[Any] = []
    for chunk in official.chat.completions.create(**settings, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            pieces.append(call.to_dict())
    assert all(piece["index"] == 0 for piece in pieces)
    assert set(pieces[0]) == {"index", "id", "type", "custom"}
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "shell")
    assert all(set(piece) == {"index", "custom"} for piece in pieces[1:])
    assert all(piece["custom"]["input"] for piece in pieces[1:])
    text = "".join(piece["custom"]["input"] for piece in pieces)
    assert text == whole[0].custom.input
    if input_key == "input":
        assert text == COMMAND
        assert len(pieces) > 5
    else:  # not what the tool was described to take: the client gets all of it
        assert json.loads(text) == {"command": COMMAND}


def test_a_custom_tool_can_be_chosen_by_name_or_allowed(official: OpenAI, llm: FakeLLM) -> None:
    tools: Any = [*TOOLS, SHELL]
    named: ChatCompletionNamedToolChoiceCustomParam = {
        "type": "custom",
        "custom": {"name": "shell"},
    }
    settings: Any = {"model": "fake", "messages": ASKED, "tools": tools}
    official.chat.completions.create(**settings, tool_choice=named)
    assert llm.chats[-1].tool_choice == ToolChoice(mode="required", name="shell")
    allowed: ChatCompletionAllowedToolChoiceParam = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [dict(named)]},
    }
    official.chat.completions.create(**settings, tool_choice=allowed)
    assert [tool.name for tool in llm.chats[-1].tools] == ["shell"]
    assert llm.chats[-1].tool_choice.mode == "required"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]},
         "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
         "tools[0].custom.format"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {
            "type": "grammar", "grammar": {"syntax": "gbnf", "definition": "x"}}}}]},
         "tools[0].custom.format.grammar.syntax"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]},
         "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
         "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_grammar": 'root ::= "x"'}, "guided_grammar"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_its_name(
    shared: httpx.Client, given: dict[str, Any], param: str
) -> None:
    response = shared.post("/v1/chat/completions", json={"messages": ASKED, **given})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_the_refusal_of_a_hosted_tool_names_the_types_that_are_there(shared: httpx.Client) -> None:
    body = {"messages": ASKED, "tools": [{"type": "web_search"}]}
    error = shared.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == "`tools[0].type` must be 'function' or 'custom', not 'web_search'."
