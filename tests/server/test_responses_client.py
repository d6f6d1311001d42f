"""The official client's Responses against a running server with the default model."""

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
