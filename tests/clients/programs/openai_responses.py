"""The official OpenAI client: responses, their stream helper, tools, parsing."""

import json

import openai
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
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
responses = client.responses
GET_WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The forecast.",
    "parameters": WEATHER,
    "strict": True,
}


class City(BaseModel):
    """A city."""

    name: str
    people: int


def thought_of(response):
    (item,) = [item for item in response.output if item.type == "reasoning"]
    return "".join(part.text for part in (item.content or item.summary))


def call_of(response):
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert item.name == "get_weather"
    assert json.loads(item.arguments) == ARGUMENTS
    return item


def case_text():
    response = responses.create(model=MODEL, input="Hi.", instructions="Be short.")
    assert response.output_text == HELLO
    assert response.status == "completed"
    assert response.instructions == "Be short."
    assert thought_of(response) == THOUGHT
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def case_stream_helper():
    with responses.stream(model=MODEL, input="Hi.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == HELLO
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == HELLO


def case_tools():
    first = responses.create(model=MODEL, input=ASK_WEATHER, tools=[GET_WEATHER])
    call = call_of(first)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = responses.create(
        model=MODEL, previous_response_id=first.id, input=[output], tools=[GET_WEATHER]
    )
    assert second.output_text == SAID
    assert second.previous_response_id == first.id


def case_tools_without_a_store():
    asked = {"role": "user", "content": ASK_WEATHER}
    first = responses.create(
        model=MODEL,
        input=[asked],
        tools=[GET_WEATHER],
        store=False,
        include=["reasoning.encrypted_content"],
    )
    call = call_of(first)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = responses.create(
        model=MODEL, input=[asked, *first.output, output], tools=[GET_WEATHER], store=False
    )
    assert second.output_text == SAID
    error = refused(
        openai.BadRequestError,
        lambda: responses.create(model=MODEL, previous_response_id=first.id, input="Hi."),
    )
    assert error.code == "previous_response_not_found"


def case_streamed_tools():
    with responses.stream(model=MODEL, input=ASK_WEATHER, tools=[GET_WEATHER]) as stream:
        events = list(stream)
        call_of(stream.get_final_response())
    kinds = [event.type for event in events]
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert kinds.count("response.function_call_arguments.done") == 1


def case_forced_call():
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        call_of(
            responses.create(
                model=MODEL, input=ASK_WEATHER, tools=[GET_WEATHER], tool_choice=choice
            )
        )


def case_parse():
    response = responses.parse(model=MODEL, input=ASK_JSON, text_format=City)
    assert response.output_parsed == City(**CITY)


def case_streamed_parse():
    with responses.stream(model=MODEL, input=ASK_JSON, text_format=City) as stream:
        list(stream)
        assert stream.get_final_response().output_parsed == City(**CITY)


def case_retrieve_and_delete():
    response = responses.create(model=MODEL, input="Hi.")
    assert responses.retrieve(response.id).output_text == HELLO
    responses.delete(response.id)
    refused(openai.NotFoundError, lambda: responses.retrieve(response.id))


run(globals())
