"""The official client against a running server with the default model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam
from jsonschema import validate

from headroom.llm import LLM
from headroom.options import Options
from tests.server.fakes import serving

CAPITAL: list[MessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
SURE = {"temperature": 0}  # the same answer each time; not a field of Anthropic's newest client


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), context=512, parallel=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[Anthropic]:
    with (
        serving(llm, Options(port=0)) as server,
        Anthropic(base_url=server.address, api_key="none", max_retries=0) as client,
    ):
        yield client


def answer(client: Anthropic, messages: list[MessageParam], **more: Any) -> str:
    message = client.messages.create(
        model="m", max_tokens=40, messages=messages, extra_body=SURE, **more
    )
    (block,) = message.content
    assert block.type == "text"
    assert message.stop_reason == "end_turn"
    return block.text


def test_a_streamed_answer_is_the_whole_one(client: Anthropic) -> None:
    whole = answer(client, CAPITAL)
    assert "Paris" in whole
    with client.messages.stream(
        model="m", max_tokens=40, messages=CAPITAL, extra_body=SURE
    ) as stream:
        assert "".join(stream.text_stream) == whole


def test_an_answer_that_the_client_begins_goes_on_as_the_model_would(client: Anthropic) -> None:
    whole = answer(client, CAPITAL)
    start, paris, rest = whole.partition(" Paris")
    begun: list[MessageParam] = [*CAPITAL, {"role": "assistant", "content": start}]
    assert answer(client, begun) == paris + rest


def test_tokens_are_counted_by_the_model_s_template(client: Anthropic, llm: LLM) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: a=1;"}]
    turns = [{"role": "system", "content": "Be short."}, *(dict(turn) for turn in CAPITAL)]
    expected = len(llm.encode_chat(turns))
    counted = client.messages.count_tokens(
        model="m",
        messages=CAPITAL,
        extra_body={"system": [*system, {"type": "text", "text": "Be short."}]},
    )
    assert counted.input_tokens == expected


def test_an_answer_matches_its_schema(client: Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    validate(json.loads(answer(client, CAPITAL, output_config=form)), CITY)


def test_a_schema_that_cannot_be_compiled_is_refused_with_its_field(client: Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "colour"}}}
    with pytest.raises(anthropic.BadRequestError, match="schema"):
        answer(client, CAPITAL, output_config=form)


def test_an_answer_ends_where_the_context_ends(client: Anthropic) -> None:
    message = client.messages.create(
        model="m", max_tokens=4_000, messages=CAPITAL, extra_body={"ignore_eos": True}
    )
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 512
