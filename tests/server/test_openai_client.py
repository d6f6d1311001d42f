"""The official client against a running server with the default model."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel, Field

from headroom.llm import LLM
from headroom.options import Options
from headroom.server.http_server import HttpServer
from tests.server.fakes import serving, wait_until

CAPITAL: list[ChatCompletionUserMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
PROMPT = "The three primary colours are"


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), context=1024, parallel=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[HttpServer]:
    with serving(llm, Options(port=0)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    return model.id


def streamed_text(client: OpenAI, model: str, prompt: str, seed: int) -> str:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0.8,
        seed=seed,
        max_tokens=12,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_a_chat_is_answered(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=32
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert "<|" not in (choice.message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    timings: Any = answer.model_extra
    assert timings["timings"]["prefill_ms"] > 0
    assert timings["timings"]["decode_tokens_per_second"] > 0


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: OpenAI, model: str) -> None:
    settings: dict[str, Any] = {
        "model": model, "messages": CAPITAL, "temperature": 0.8, "seed": 3, "max_tokens": 10,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    chunks = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_8_concurrent_streams_give_each_the_text_it_has_alone(client: OpenAI, model: str) -> None:
    prompts = [
        "Tell me a story about a fox.",
        "What is 12 times 12?",
        "Write a haiku about rain.",
        "Explain gravity to a child, step by step, and give three examples from daily life.",
        "Name five fruits.",
        "Translate 'good morning' into French.",
        "¿Qué es un árbol? 🌳",
        "Write a Python function that reverses a list. " * 4,
    ]
    asked = list(enumerate(prompts))
    alone = [streamed_text(client, model, prompt, seed) for seed, prompt in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda item: streamed_text(client, model, item[1], item[0]), asked)
        )
    assert together == alone
    assert len(set(alone)) == 8


def test_a_completion_continues_text_and_tokens_alike(
    client: OpenAI, model: str, server: HttpServer
) -> None:
    answer = httpx.post(f"{server.address}/tokenize", json={"content": PROMPT, "add_special": True})
    tokens = answer.json()["tokens"]
    back = httpx.post(f"{server.address}/detokenize", json={"tokens": tokens}).json()["content"]
    assert back == PROMPT
    whole = client.completions.create(
        model=model, prompt=[PROMPT, "Once upon a time"], temperature=0, max_tokens=12
    )
    by_tokens = client.completions.create(model=model, prompt=tokens, temperature=0, max_tokens=12)
    assert by_tokens.choices[0].text == whole.choices[0].text
    assert len(whole.choices) == 2
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    stream = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_chat_logprobs_spell_the_answer_and_greedy_takes_the_likeliest(
    client: OpenAI, model: str
) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    spelled = b"".join(bytes(entry.bytes or []) for entry in entries).decode()
    assert spelled == choice.message.content
    for entry in entries:
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        numbers = [rival.logprob for rival in entry.top_logprobs]
        assert len(numbers) == 3
        assert numbers == sorted(numbers, reverse=True)


def test_completion_logprobs_cover_the_echoed_prompt(client: OpenAI, model: str) -> None:
    choice = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2, echo=True
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert choice.text.startswith(PROMPT)
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    first: Any = logprobs.token_logprobs[0]
    assert first is None
    assert all(number <= 0 for number in logprobs.token_logprobs[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_a_prompt_of_one_token_is_echoed_with_logprobs(client: OpenAI, model: str) -> None:
    choice = client.completions.create(
        model=model, prompt=[100], max_tokens=1, logprobs=0, echo=True
    ).choices[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 2


def test_n_answers_differ_and_are_repeated_with_the_seed(client: OpenAI, model: str) -> None:
    settings: dict[str, Any] = {
        "model": model, "messages": CAPITAL, "temperature": 1.2, "seed": 5, "max_tokens": 8,
    }  # fmt: skip

    def texts(**more: Any) -> list[str | None]:
        answer = client.chat.completions.create(**settings, **more)
        return [choice.message.content for choice in answer.choices]

    several = texts(n=3)
    assert len(set(several)) == 3
    assert texts(n=3) == several
    assert texts() == several[:1]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**settings, n=3, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == several


def test_a_stop_text_ends_an_answer(client: OpenAI, model: str) -> None:
    settings: dict[str, Any] = {
        "model": model, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 24,
    }  # fmt: skip
    free = client.completions.create(**settings).choices[0]
    assert "7" in free.text
    stopped = client.completions.create(**settings, stop=["7", "never"]).choices[0]
    assert stopped.text == free.text.partition("7")[0]
    assert stopped.finish_reason == "stop"


def test_a_bias_forbids_or_forces_a_token(client: OpenAI, model: str) -> None:
    settings: dict[str, Any] = {
        "model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 3,
    }  # fmt: skip
    forced = client.completions.create(**settings, logit_bias={"100": 100}, logprobs=0)
    plain = client.completions.create(**settings)
    assert forced.choices[0].logprobs is not None
    assert len(set(forced.choices[0].logprobs.tokens or [])) == 1
    assert forced.choices[0].text != plain.choices[0].text


def test_ignore_eos_writes_on_to_the_last_token(client: OpenAI, model: str) -> None:
    settings: dict[str, Any] = {
        "model": model, "messages": CAPITAL, "temperature": 0, "max_tokens": 16,
    }  # fmt: skip
    answer = client.chat.completions.create(**settings, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_errors_are_the_clients_own(client: OpenAI, model: str) -> None:
    ask: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-9")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(model=model, messages=CAPITAL, temperature=-1)
    assert wrong.value.param == "temperature"
    assert "temperature is -1" in wrong.value.message
    with pytest.raises(openai.BadRequestError) as empty:
        ask(model=model, messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as long:
        ask(model=model, messages=[{"role": "user", "content": "word " * 2000}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as outside:
        client.completions.create(model=model, prompt=[10**6])
    assert outside.value.param == "prompt"
    with pytest.raises(openai.APIStatusError) as large:
        ask(model=model, messages=[{"role": "user", "content": "x" * 10_000_000}])
    assert large.value.status_code == 413


@pytest.mark.parametrize("text", ["a" * 3_000_000, "🙂 " * 100_000])
def test_megabytes_of_prompt_are_refused_in_seconds(client: OpenAI, model: str, text: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.with_options(timeout=60).completions.create(model=model, prompt=text)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("content", ["\x00", "<|im_end|><|im_start|>system\n", "\u202e\ufeff", ""])
def test_odd_text_is_answered(client: OpenAI, model: str, content: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=2
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_client_that_leaves_frees_the_engine(client: OpenAI, model: str, llm: LLM) -> None:
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: llm.engine.stats().requests_running == 0, timeout_s=5)
    assert llm.engine.stats().requests_finished["cancelled"] >= 1
    assert llm.engine.stats().cache_pages_used == 0


def test_metrics_report_what_the_engine_did(server: HttpServer, client: OpenAI, model: str) -> None:
    client.completions.create(model=model, prompt=PROMPT, max_tokens=2)
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    numbers = {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}
    assert numbers["headroom_generated_tokens_total"] >= 2
    assert numbers["headroom_prompt_tokens_total"] >= 5
    assert numbers["headroom_time_to_first_token_seconds_count"] >= 1


def test_raw_streams_are_events_as_the_protocol_has_them(server: HttpServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    text = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).text
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


class Person(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=99)]


def test_parse_gives_a_class_whatever_a_small_model_would_say(client: OpenAI, model: str) -> None:
    asked: list[Any] = [{"role": "user", "content": "Tell me of a person."}]
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=model, messages=asked, response_format=Person, seed=seed, max_tokens=60
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"


def test_a_required_tool_is_called_and_its_result_is_answered(client: OpenAI, model: str) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(Person, name="save_person")]
    history: list[Any] = [{"role": "user", "content": "Please save Tom, who is 40."}]
    settings: dict[str, Any] = {
        "model": model, "tools": tools, "tool_choice": "required", "seed": 1, "max_tokens": 80,
        "parallel_tool_calls": False,
    }  # fmt: skip
    first = client.chat.completions.parse(messages=history, **settings).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls
    call = first.message.tool_calls[0]
    assert call.function.name == "save_person"
    assert isinstance(call.function.parsed_arguments, Person)
    with client.chat.completions.stream(messages=history, **settings) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    history += [
        first.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "Saved."},
    ]
    second = client.chat.completions.create(
        model=model, messages=history, tools=tools, max_tokens=8, temperature=0
    )
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert second.usage is not None
    assert first.message.content is None
    assert second.usage.prompt_tokens > 20


def test_equal_prompts_in_one_body_get_different_answers(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=[PROMPT] * 3, temperature=1.5, seed=3, max_tokens=12
    )
    assert len({choice.text for choice in answer.choices}) == 3


def test_near_texts_have_near_vectors(client: OpenAI, model: str) -> None:
    texts = ["The cat sat on the mat.", "A cat sat on a mat.", "Stocks fell sharply on Monday."]
    answer = client.embeddings.create(model=model, input=texts)
    cat, other, stocks = (np.array(entry.embedding) for entry in answer.data)
    assert cat @ other > cat @ stocks
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-5)


LINES = r"""
start: "begin" LF step+ "end"
step: ("go" | "turn") " " /[a-z "]{1,4}/ LF
%import common.LF
"""


def custom_tool(definition: str) -> Any:
    grammar = {"syntax": "lark", "definition": definition}
    form = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {"name": "robot", "description": "Moves.", "format": form}}


def test_the_text_of_a_custom_tool_matches_its_grammar(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Let the robot move."}],
        tools=[custom_tool(LINES)],
        tool_choice={"type": "custom", "custom": {"name": "robot"}},
        max_tokens=100,
        temperature=1.0,
        seed=1,
    )
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "custom"
    text = call.custom.input
    if answer.choices[0].finish_reason == "tool_calls":
        assert re.fullmatch(r'begin\n((go|turn) [a-z "]{1,4}\n)+end', text), text
    else:
        assert text.startswith("begin\n")


def test_a_custom_tool_with_a_wrong_grammar_is_refused_with_the_reason(
    client: OpenAI, model: str
) -> None:
    for definition in ("start: missing", "start: <|im_end|>"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=model, messages=CAPITAL, tools=[custom_tool(definition)]
            )
        assert caught.value.param == "tools[0].custom.format"
        assert "'robot' cannot be used" in caught.value.message
        assert definition.removeprefix("start: ") in caught.value.message
