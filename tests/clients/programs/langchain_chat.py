"""langchain-openai: chat, tools, structured output, the responses API, embeddings."""

from typing import Literal

from cases import (
    ADDRESS,
    ARGUMENTS,
    ASK_CALL,
    ASK_JSON,
    ASK_OWNER,
    ASK_WEATHER,
    CITY,
    HELLO,
    KEY,
    MODEL,
    OWNER,
    RESULT,
    SAID,
    run,
)
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

SERVER = {"model": MODEL, "base_url": f"{ADDRESS}/v1", "api_key": KEY, "max_retries": 0}
model = ChatOpenAI(**SERVER)


class City(BaseModel):
    """A city."""

    name: str
    people: int


class Cat(BaseModel):
    """A cat."""

    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"] = "dog"
    tricks: list[str]


class Owner(BaseModel):
    """Somebody with names, each of them once, who has a pet."""

    names: set[str]
    pet: Cat | Dog = Field(discriminator="kind")


@tool
def get_weather(city: str, days: int) -> str:
    """Return the forecast of a city."""
    assert (city, days) == (ARGUMENTS["city"], ARGUMENTS["days"])
    return RESULT


def use_a_tool(chat):
    bound = chat.bind_tools([get_weather])
    history = [HumanMessage(ASK_WEATHER)]
    asked = bound.invoke(history)
    (call,) = asked.tool_calls
    final = bound.invoke([*history, asked, get_weather.invoke(call)])
    assert final.text == SAID


def case_chat():
    answer = model.invoke("Hi.")
    assert answer.content == HELLO
    assert answer.usage_metadata["output_tokens"] > 0


def case_stream():
    assert "".join(chunk.content for chunk in model.stream("Hi.")) == HELLO


def case_tools():
    use_a_tool(model)


def case_streamed_tools():
    whole = None
    for chunk in model.bind_tools([get_weather]).stream(ASK_WEATHER):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)


def case_structured_output():
    assert model.with_structured_output(City).invoke(ASK_JSON) == City(**CITY)
    by_call = model.with_structured_output(City, method="function_calling")
    assert by_call.invoke(ASK_CALL) == City(**CITY)
    by_mode = model.with_structured_output(City, method="json_mode")
    assert by_mode.invoke(ASK_JSON) == City(**CITY)


def case_structured_output_with_a_set_and_a_choice():
    by_call = model.with_structured_output(Owner, method="function_calling")
    assert by_call.invoke(ASK_OWNER) == Owner(**OWNER)


def case_responses():
    chat = ChatOpenAI(**SERVER, use_responses_api=True)
    assert chat.invoke("Hi.").text == HELLO
    assert "".join(chunk.text for chunk in chat.stream("Hi.")) == HELLO
    use_a_tool(chat)


def case_embeddings():
    embeddings = OpenAIEmbeddings(**SERVER, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["one", "two"])) == 2


run(globals())
