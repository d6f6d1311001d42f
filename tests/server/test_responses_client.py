"""The official client's Responses against a running server with the default model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from headroom.llm import LLM
from headroom.options import Options
from tests.server.fakes import serving

QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[OpenAI]:
    with (
        LLM(str(smollm2_path), context=1024, parallel=4) as llm,
        serving(llm, Options(port=0)) as server,
        OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_question_is_answered_and_the_answer_remembered(client: OpenAI) -> None:
    first = client.responses.create(model="m", input=QUESTION, temperature=0, max_output_tokens=32)
    assert first.status == "completed"
    assert "Paris" in first.output_text
    assert "<|" not in first.output_text
    again: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Which country is it in?"},
    ]
    settings: Any = {"model": "m", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(input=again, **settings)
    continued = client.responses.create(
        input="Which country is it in?", previous_response_id=first.id, **settings
    )
    assert continued.output_text == whole.output_text
    assert continued.usage is not None
    assert whole.usage is not None
    assert continued.usage.input_tokens == whole.usage.input_tokens
    counted = client.responses.input_tokens.count(
        model="m", input="Which country is it in?", previous_response_id=first.id
    )
    assert counted.input_tokens == whole.usage.input_tokens


def test_a_stream_is_the_whole_response_in_pieces(client: OpenAI) -> None:
    settings: Any = {"model": "m", "input": QUESTION, "temperature": 0, "max_output_tokens": 32}
    whole = client.responses.create(**settings)
    pieces = []
    with client.responses.stream(**settings) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
        final = events.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    assert len(pieces) > 3


def test_a_class_is_filled_by_a_small_model(client: OpenAI) -> None:
    class City(BaseModel):
        name: str
        continent: Literal["Europe", "Asia", "Africa"]
        large: bool

    parsed = client.responses.parse(
        model="m", input="Describe Paris.", text_format=City, max_output_tokens=100, temperature=0
    )
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(
        model="m", input="Describe Paris.", text_format=City, max_output_tokens=100, temperature=0
    ) as events:
        assert events.get_final_response().output_parsed == parsed.output_parsed


def test_a_schema_that_cannot_be_used_is_named(client: OpenAI) -> None:
    schema: dict[str, object] = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    with pytest.raises(jsonschema.SchemaError):
        jsonschema.Draft202012Validator.check_schema(schema)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input="hi", text=form)
    assert str(refused.value.param).startswith("text.format.schema")


def test_a_forced_call_matches_its_schema_and_its_output_is_used(client: OpenAI) -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool: Any = {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather of the next days.",
        "parameters": schema,
        "strict": True,
    }
    settings: Any = {"model": "m", "tools": [tool], "temperature": 0, "max_output_tokens": 100}
    settings["parallel_tool_calls"] = False  # so small a model does not stop calling by itself
    asked = "What will the weather be in Paris tomorrow?"
    with client.responses.stream(input=asked, tool_choice="required", **settings) as events:
        first = events.get_final_response()
    (call,) = (item for item in first.output if item.type == "function_call")
    jsonschema.validate(call.parsed_arguments, schema)
    second = client.responses.create(
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}],
        previous_response_id=first.id,
        tool_choice="none",
        **settings,
    )
    assert second.output_text
    assert all(item.type != "function_call" for item in second.output)


def test_the_text_of_a_custom_tool_matches_its_expression(client: OpenAI) -> None:
    expression = "[a-c]{3}-[0-9]{2}"
    form: Any = {"type": "grammar", "syntax": "regex", "definition": expression}
    tool: Any = {"type": "custom", "name": "code", "description": "Takes a code.", "format": form}
    response = client.responses.create(
        model="m",
        input="Call the tool with a code.",
        tools=[tool],
        tool_choice={"type": "custom", "name": "code"},
        parallel_tool_calls=False,
        max_output_tokens=100,
    )
    (call,) = (item for item in response.output if item.type == "custom_tool_call")
    assert re.fullmatch(expression, call.input)
