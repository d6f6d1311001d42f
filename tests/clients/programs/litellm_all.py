"""LiteLLM: the server as an OpenAI, Anthropic and Ollama provider."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a table when imported

import litellm
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
    WEATHER,
    run,
)
from pydantic import BaseModel

litellm.telemetry = False
litellm.suppress_debug_info = True
GET_WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The forecast.", "parameters": WEATHER},
}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{ADDRESS}/v1", "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": ADDRESS, "api_key": KEY}
OLLAMA = {"model": f"ollama_chat/{MODEL}", "api_base": ADDRESS, "api_key": KEY}


class City(BaseModel):
    """A city."""

    name: str
    people: int


def user(text):
    return [{"role": "user", "content": text}]


def use_a_tool(provider):
    asked = user(ASK_WEATHER)
    message = litellm.completion(**provider, messages=asked, tools=[GET_WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": RESULT}
    history = [*asked, message.model_dump(), result]
    final = litellm.completion(**provider, messages=history, tools=[GET_WEATHER])
    assert final.choices[0].message.content == SAID


def stream(provider):
    chunks = litellm.completion(**provider, messages=user("Hi."), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def case_openai_chat():
    answer = litellm.completion(**OPENAI, messages=user("Hi."))
    assert answer.choices[0].message.content == HELLO
    assert stream(OPENAI) == HELLO


def case_openai_tools():
    use_a_tool(OPENAI)


def case_openai_schema():
    answer = litellm.completion(**OPENAI, messages=user(ASK_JSON), response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content) == City(**CITY)


def case_openai_responses():
    answer = litellm.responses(**OPENAI, input="Hi.")
    (message,) = [item for item in answer.output if item.type == "message"]
    assert message.content[0].text == HELLO


def case_anthropic_chat():
    answer = litellm.completion(**ANTHROPIC, messages=user("Hi."))
    assert answer.choices[0].message.content == HELLO
    assert stream(ANTHROPIC) == HELLO


def case_anthropic_tools():
    use_a_tool(ANTHROPIC)


def case_ollama_chat():
    answer = litellm.completion(**OLLAMA, messages=user("Hi."))
    assert answer.choices[0].message.content == HELLO
    assert stream(OLLAMA) == HELLO


def case_ollama_tools():
    use_a_tool(OLLAMA)


def case_embeddings():
    answer = litellm.embedding(**OPENAI, input=["one", "two"])
    assert [entry["index"] for entry in answer.data] == [0, 1]


run(globals())
