"""The official Anthropic client: messages, stream accumulator, tools, thoughts, counting."""

import anthropic
from anthropic import Anthropic
from cases import (
    ADDRESS,
    ARGUMENTS,
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
from pydantic import BaseModel

client = Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)
messages = client.messages
GET_WEATHER = {"name": "get_weather", "description": "The forecast.", "input_schema": WEATHER}
HI = [{"role": "user", "content": "Hi."}]
QUESTION = [{"role": "user", "content": [{"type": "text", "text": ASK_WEATHER}]}]
THINKING = {"type": "enabled", "budget_tokens": 1024}


class City(BaseModel):
    """A city."""

    name: str
    people: int


def blocks(message):
    return [block.type for block in message.content]


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def call_of(message):
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", ARGUMENTS)
    assert message.stop_reason == "tool_use"
    return call


def case_message():
    message = messages.create(
        model=MODEL,
        max_tokens=4096,
        messages=HI,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        thinking=THINKING,
    )
    assert blocks(message) == ["thinking", "text"]
    assert message.content[0].thinking == THOUGHT
    assert text_of(message) == HELLO
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def case_stream_helper():
    with messages.stream(model=MODEL, max_tokens=4096, messages=HI, thinking=THINKING) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert blocks(final) == ["thinking", "text"]
    assert final.content[0].thinking == THOUGHT
    assert text_of(final) == HELLO


def case_text_stream():
    with messages.stream(model=MODEL, max_tokens=4096, messages=HI) as stream:
        assert "".join(stream.text_stream) == HELLO


def case_tools():
    first = messages.create(
        model=MODEL, max_tokens=4096, messages=QUESTION, tools=[GET_WEATHER], thinking=THINKING
    )
    final = messages.create(
        model=MODEL,
        max_tokens=4096,
        messages=[*QUESTION, {"role": "assistant", "content": first.content}, result_of(first)],
        tools=[GET_WEATHER],
        thinking=THINKING,
    )
    assert text_of(final) == SAID
    assert final.stop_reason == "end_turn"


def result_of(message):
    result = {
        "type": "tool_result",
        "tool_use_id": call_of(message).id,
        "content": [{"type": "text", "text": RESULT}],
    }
    return {"role": "user", "content": [result]}


def case_streamed_tools():
    with messages.stream(
        model=MODEL, max_tokens=4096, messages=QUESTION, tools=[GET_WEATHER]
    ) as stream:
        kinds = [event.type for event in stream]
        call_of(stream.get_final_message())
    assert kinds.count("input_json") > 1


def case_tool_choice():
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        call_of(
            messages.create(
                model=MODEL,
                max_tokens=4096,
                messages=QUESTION,
                tools=[GET_WEATHER],
                tool_choice=choice,
            )
        )


def case_tool_runner():
    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Return the forecast of a city."""
        assert (city, days) == (ARGUMENTS["city"], ARGUMENTS["days"])
        return RESULT

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=4096, messages=QUESTION, tools=[get_weather]
    )
    assert text_of(runner.until_done()) == SAID


def case_parse():
    message = messages.parse(
        model=MODEL,
        max_tokens=4096,
        messages=[{"role": "user", "content": ASK_JSON}],
        output_format=City,
    )
    assert message.parsed_output == City(**CITY)


def case_count_tokens():
    few = messages.count_tokens(model=MODEL, messages=HI).input_tokens
    more = messages.count_tokens(model=MODEL, messages=HI, tools=[GET_WEATHER]).input_tokens
    counted = messages.create(model=MODEL, max_tokens=4096, messages=HI).usage.input_tokens
    assert 0 < few < more
    assert few == counted


def case_a_stop_text():
    message = messages.create(model=MODEL, max_tokens=4096, messages=HI, stop_sequences=[" script"])
    assert text_of(message) == "Hello from the"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " script")


def case_errors():
    error = refused(
        anthropic.BadRequestError,
        lambda: messages.create(model=MODEL, max_tokens=0, messages=HI),
    )
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "invalid_request_error"


run(globals())
