"""Ollama's official Python client."""

import ollama
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
    refused,
    run,
)
from pydantic import BaseModel

client = ollama.Client(host=ADDRESS, headers={"authorization": f"Bearer {KEY}"})
HI = [{"role": "user", "content": "Hi."}]


class City(BaseModel):
    """A city."""

    name: str
    people: int


def get_weather(city: str, days: int) -> str:
    """Return the forecast.

    Args:
      city: Where.
      days: For how many days.
    """
    assert (city, days) == (ARGUMENTS["city"], ARGUMENTS["days"])
    return RESULT


def case_models():
    (model,) = client.list().models
    assert model.model.split(":")[0] == MODEL
    shown = client.show(model.model)
    assert {"completion", "tools"} <= set(shown.capabilities)
    (running,) = client.ps().models
    assert running.model == model.model


def case_chat():
    answer = client.chat(
        MODEL, messages=HI, think=True, options={"temperature": 0, "num_ctx": 4096}
    )
    assert answer.message.content == HELLO
    assert answer.message.thinking == THOUGHT
    assert answer.done
    assert answer.done_reason == "stop"
    assert answer.eval_count > 0


def case_streamed_chat():
    parts = list(client.chat(MODEL, messages=HI, stream=True, think=True, keep_alive="5m"))
    assert "".join(part.message.content or "" for part in parts) == HELLO
    assert "".join(part.message.thinking or "" for part in parts) == THOUGHT
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def case_tools():
    history = [{"role": "user", "content": ASK_WEATHER}]
    asked = client.chat(MODEL, messages=history, tools=[get_weather]).message
    (call,) = asked.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    result = get_weather(**call.function.arguments)
    history += [asked, {"role": "tool", "tool_name": "get_weather", "content": result}]
    assert client.chat(MODEL, messages=history, tools=[get_weather]).message.content == SAID


def case_streamed_tools():
    history = [{"role": "user", "content": ASK_WEATHER}]
    parts = client.chat(MODEL, messages=history, tools=[get_weather], stream=True)
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert [call.function.arguments for call in calls] == [ARGUMENTS]


def case_format():
    answer = client.chat(
        MODEL,
        messages=[{"role": "user", "content": ASK_JSON}],
        format=City.model_json_schema(),
        think=False,
    )
    assert City.model_validate_json(answer.message.content) == City(**CITY)


def case_generate():
    answer = client.generate(MODEL, "Hi.", think=False)
    assert answer.response == HELLO
    parts = client.generate(MODEL, "Hi.", stream=True, think=False)
    assert "".join(part.response for part in parts) == HELLO


def case_embed():
    assert len(client.embed(MODEL, ["one", "two"]).embeddings) == 2


def case_errors():
    odd = [{"role": "nobody", "content": "Hi."}]
    error = refused(ollama.ResponseError, lambda: client.chat(MODEL, messages=odd))
    assert error.status_code == 400
    assert "nobody" in error.error


run(globals())
