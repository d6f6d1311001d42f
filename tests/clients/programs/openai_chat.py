"""The official OpenAI client: chat completions, tools, structured output, streaming helpers."""

import base64
import json
import struct

import openai
from cases import (
    ADDRESS,
    ARGUMENTS,
    ASK_CALL,
    ASK_JSON,
    ASK_WEATHER,
    CITY,
    HELLO,
    KEY,
    MODEL,
    RESULT,
    SAID,
    THOUGHT,
    WEATHER,
    refused,
    run,
)
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
chat = client.chat.completions
GET_WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The forecast.", "parameters": WEATHER},
}
HI = [{"role": "user", "content": "Hi."}]
QUESTION = [{"role": "user", "content": ASK_WEATHER}]


class City(BaseModel):
    """A city."""

    name: str
    people: int


def user(text):
    return [{"role": "user", "content": text}]


def case_models():
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def case_chat():
    answer = chat.create(model=MODEL, messages=HI)
    (choice,) = answer.choices
    assert choice.message.content == HELLO
    assert choice.message.reasoning_content == THOUGHT
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def case_a_name_that_agents_have_built_in():
    assert chat.create(model="gpt-5", messages=HI).choices[0].message.content == HELLO


def case_streamed_chat():
    text = thought = ""
    usage = None
    for chunk in chat.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
    assert (text, thought) == (HELLO, THOUGHT)
    assert usage.completion_tokens > 0


def case_tools():
    answer = chat.create(model=MODEL, messages=QUESTION, tools=[GET_WEATHER])
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    history = [
        *QUESTION,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    final = chat.create(model=MODEL, messages=history, tools=[GET_WEATHER])
    assert final.choices[0].message.content == SAID
    assert final.choices[0].finish_reason == "stop"


def case_streamed_tools():
    names, arguments, pieces, reason = {}, {}, 0, None
    for chunk in chat.create(model=MODEL, messages=QUESTION, tools=[GET_WEATHER], stream=True):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    assert call.id
                    assert call.index not in names  # the name comes once, and first
                    names[call.index] = call.function.name
                assert call.index in names
                if call.function.arguments:
                    pieces += 1
                    arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert names == {0: "get_weather"}
    assert json.loads(arguments[0]) == ARGUMENTS
    assert pieces > 1  # the arguments came as they were generated
    assert reason == "tool_calls"


def case_stream_helper():
    events = []
    with chat.stream(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(City), strict(GET_WEATHER)],
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert call.function.parsed_arguments == ARGUMENTS
    assert events.count("tool_calls.function.arguments.done") == 1
    assert events.count("tool_calls.function.arguments.delta") > 1


def strict(tool):
    return {**tool, "function": {**tool["function"], "strict": True}}


def case_several_calls():
    message = chat.create(model=MODEL, messages=user("Two cities."), tools=[GET_WEATHER])
    message = message.choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Oslo", "Rome"]
    assert len({call.id for call in message.tool_calls}) == 2
    assert message.content.strip() == "I look at both."


def case_tool_choice():
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = chat.create(
            model=MODEL, messages=QUESTION, tools=[GET_WEATHER], tool_choice=choice
        )
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == ARGUMENTS
    answer = chat.create(model=MODEL, messages=HI, tools=[GET_WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == HELLO
    assert not answer.choices[0].message.tool_calls


def case_parse():
    answer = chat.parse(model=MODEL, messages=user(ASK_JSON), response_format=City)
    assert answer.choices[0].message.parsed == City(**CITY)


def case_parse_a_call():
    tool = openai.pydantic_function_tool(City)
    answer = chat.parse(model=MODEL, messages=user(ASK_CALL), tools=[tool])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == City(**CITY)


def case_streamed_parse():
    with chat.stream(model=MODEL, messages=user(ASK_JSON), response_format=City) as stream:
        kinds = [event.type for event in stream]
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == City(**CITY)
    assert "content.done" in kinds


def case_json_object():
    answer = chat.create(
        model=MODEL, messages=user(ASK_JSON), response_format={"type": "json_object"}
    )
    assert json.loads(answer.choices[0].message.content) == CITY


def case_fields_that_other_clients_send():
    answer = chat.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            *HI,
        ],
        max_completion_tokens=100_000_000,
        store=False,
        metadata={"a": "b"},
        user="me",
        service_tier="auto",
        verbosity="low",
        prompt_cache_key="key",
        n=2,
        seed=7,
        stop=["NEVER"],
        logprobs=True,
        parallel_tool_calls=True,
        tools=[GET_WEATHER],
    )
    assert [choice.message.content for choice in answer.choices] == [HELLO, HELLO]
    assert answer.choices[0].logprobs.content


def case_a_stop_text():
    answer = chat.create(model=MODEL, messages=HI, stop=" script")
    assert answer.choices[0].message.content == "Hello from the"
    assert answer.choices[0].finish_reason == "stop"


def case_errors():
    error = refused(
        openai.BadRequestError,
        lambda: chat.create(model=MODEL, messages=HI, response_format={"type": "odd"}),
    )
    assert error.body["type"] == "invalid_request_error"
    assert "response_format" in error.body["param"]


def case_embeddings():
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert [entry.index for entry in answer.data] == [0, 1]
    assert abs(sum(number**2 for number in answer.data[0].embedding) - 1) < 1e-3
    raw = client.embeddings.create(model=MODEL, input="one", encoding_format="base64")
    packed = base64.b64decode(raw.data[0].embedding)
    numbers = struct.unpack(f"<{len(packed) // 4}f", packed)
    assert list(numbers) == answer.data[0].embedding


run(globals())
