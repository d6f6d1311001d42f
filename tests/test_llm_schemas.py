"""Answers under JSON schemas: random weights, temperature 1, alone and in a batch."""

import json
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headroom.answers import AnswerReader, Completion, join_deltas
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.llm import LLM, ChatPrompt
from headroom.text.conversation import Conversation, OutputFormat, Thinking
from tests.schema_corpus import random_schema
from tests.tiny import SPECIAL, VOCAB, byte_tokenizer, llama_config, random_model, save_gguf

MERGES = ['" :', '": Ġ', '{ "', '" ,', '", Ġ', "t r", "u e", "tr ue", "n u", "l l", "nu ll", "1 2"]
MERGES += ["Ċ Ġ", "ĊĠ Ġ", "] ,", "} ,", "] }", "} }", "0 0", "a n", "r e"]
THINK = ("<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking | default(false) %}<think>\n{% endif %}{% endif %}"
)
MOST = 400  # tokens of an answer
FULL = 500  # schemas


def add_vocabulary(writer: Any) -> None:
    """Write a vocabulary of bytes, control tokens, tokens that JSON is full of, and unused ids."""
    known = {index: text for text, index in byte_tokenizer().get_vocab().items()}
    merged = ["".join(pair.split(" ")) for pair in MERGES]
    tokens = [known[index] for index in range(len(known))] + merged + list(THINK)
    tokens += [f"[PAD{index}]" for index in range(len(tokens), VOCAB)]
    kinds = {**dict.fromkeys(SPECIAL, 3), **dict.fromkeys(THINK, 4)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([5 if t.startswith("[PAD") else kinds.get(t, 1) for t in tokens])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(256)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tiny.add_vocabulary", add_vocabulary)
        save_gguf(random_model(llama_config(num_hidden_layers=1)), path)
    with LLM(str(path), device="cpu", context=512, parallel=8, kv_type="f32") as made:
        yield made


def prepare(llm: LLM, wanted: OutputFormat | None, thinking: Thinking | None = None) -> ChatPrompt:
    return llm.prepare_chat(
        Conversation(
            messages=[{"role": "user", "content": "Go."}],
            output_format=wanted,
            thinking=thinking or Thinking(enabled=False),
        )
    )


def schema_prompt(llm: LLM, schema: Any) -> ChatPrompt:
    return prepare(llm, OutputFormat(kind="json_schema", value=schema))


def answers(
    llm: LLM, prompts: Sequence[ChatPrompt], params: Sequence[SamplingParams]
) -> list[Completion]:
    """Answer all prompts at the same time."""
    running: list[tuple[GenerationRequest, AnswerReader, queue.SimpleQueue[TokenEvent]]] = []
    for prompt, one in zip(prompts, params, strict=True):
        request = llm.request(prompt.tokens, one, prompt.new_constraint(one.max_tokens))
        reader = AnswerReader(request, llm.tokenizer, llm.engine, parser=prompt.new_parser())
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        llm.engine.submit(request, events.put)
        running.append((request, reader, events))
    done = []
    for _, reader, events in running:
        deltas = [reader.read(events.get(timeout=60))]
        while deltas[-1].finish_reason is None:
            deltas.append(reader.read(events.get(timeout=60)))
        assert deltas[-1].finish_reason != "error", deltas[-1].error
        done.append(join_deltas(deltas))
    return done


def check_schemas(llm: LLM, first: int, count: int) -> Counter[str]:
    """Answer under so many schemas, alone and eight together; return how the answers ended."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    ended: Counter[str] = Counter()
    for start in range(first, first + count, 8):
        seeds = range(start, min(start + 8, first + count))
        schemas = [random_schema(seed) for seed in seeds]
        prompts = [schema_prompt(llm, schema) for schema in schemas]
        params = [SamplingParams(seed=seed, max_tokens=MOST) for seed in seeds]
        together = answers(llm, prompts, params)
        alone = [
            answers(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)
        ]
        for seed, schema, one, other in zip(seeds, schemas, together, alone, strict=True):
            assert one.token_ids == other.token_ids, seed
            assert one.text == other.text, seed
            ended[one.finish_reason] += 1
            if one.finish_reason == "stop":
                try:
                    value = json.loads(one.text)
                    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
                except ValueError as error:
                    pytest.fail(f"schema {seed} {schema}: {one.text!r}: {error}")
    return ended


def test_finished_answers_match_their_schemas_alone_and_in_a_batch(llm: LLM) -> None:
    ended = check_schemas(llm, 0, 48)
    assert ended["stop"] > 36


@pytest.mark.slow
def test_finished_answers_match_500_schemas_alone_and_in_a_batch(llm: LLM) -> None:
    ended = check_schemas(llm, 0, FULL)
    assert ended["stop"] > 0.75 * FULL


SMALL = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, 2, 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MOST),
    "filters": SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.2, max_tokens=MOST),
    "penalties": SamplingParams(
        seed=2, repetition_penalty=1.8, frequency_penalty=1.0, presence_penalty=1.0, max_tokens=MOST
    ),
    "bias": SamplingParams(seed=3, logit_bias={5: 100.0, 256: 100.0}, max_tokens=MOST),
    "hot": SamplingParams(seed=4, temperature=20.0, max_tokens=MOST),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_schema_holds_whatever_the_sampling_settings(llm: LLM, name: str) -> None:
    prompt = schema_prompt(llm, SMALL)
    done = answers(llm, [prompt], [SETTINGS[name]])[0]
    assert done.finish_reason == "stop"
    jsonschema.validate(json.loads(done.text), SMALL)


def test_logprobs_under_a_schema_are_those_of_the_model(llm: LLM) -> None:
    prompt = schema_prompt(llm, {"const": "a"})
    done = answers(llm, [prompt], [SamplingParams(temperature=0, logprobs=5)])[0]
    assert json.loads(done.text) == "a"
    for at, found in enumerate(done.logprobs):
        before = [*prompt.tokens, *done.token_ids[:at]]
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True)
        free = llm.generate([before], params)[0].logprobs[0]
        assert found.top == free.top
        assert found.logprob <= free.top[0][1]
    assert any(found.logprob < found.top[0][1] for found in done.logprobs)


def test_several_answers_to_one_prompt_have_states_of_their_own(llm: LLM) -> None:
    prompt = schema_prompt(llm, SMALL)
    params = [SamplingParams(seed=1, draw=draw, max_tokens=MOST) for draw in range(6)]
    texts = [done.text for done in answers(llm, [prompt] * 6, params)]
    assert len(set(texts)) > 3
    for text in texts:
        jsonschema.validate(json.loads(text), SMALL)


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (OutputFormat(kind="choice", value=["red", "green"]), {"red", "green"}),
        (OutputFormat(kind="regex", value="[ab]"), {"a", "b"}),
        (OutputFormat(kind="lark", value='start: "x" ("1" | "2")'), {"x1", "x2"}),
    ],
    ids=["choice", "regex", "lark"],
)
def test_other_output_formats_hold(llm: LLM, wanted: OutputFormat, texts: set[str]) -> None:
    params = [SamplingParams(seed=seed, temperature=5.0) for seed in range(16)]
    done = answers(llm, [prepare(llm, wanted)] * 16, params)
    assert {one.text for one in done} == texts
    assert {one.finish_reason for one in done} == {"stop"}


def test_a_budget_ends_a_thought_and_is_told(llm: LLM) -> None:
    thinking = Thinking(enabled=True, budget=12)
    prompt = prepare(llm, OutputFormat(kind="choice", value=["yes", "no"]), thinking)
    assert prompt.in_thought
    params = SamplingParams(seed=5, temperature=5.0, max_tokens=200)
    done = answers(llm, [prompt], [params])[0]
    assert done.text in ("yes", "no")
    assert done.thought
    details = done.finish_details
    assert details is not None
    if llm.tokenizer.find("</think>") in done.token_ids[:12]:
        assert details.close_kind == "natural"
    else:
        assert details.close_kind == "hard"
        assert done.token_ids.index(llm.tokenizer.find("</think>") or -1) == 13  # after "\n"
        assert details.thinking_tokens == 14
    assert details.total_tokens == done.generated_tokens == len(done.token_ids)
    assert details.thinking_tokens + details.content_tokens == details.total_tokens
    assert done.thought_tokens == details.thinking_tokens


def test_an_effort_becomes_a_budget_of_the_answer_s_tokens(llm: LLM) -> None:
    end = llm.tokenizer.find("</think>")
    params = SamplingParams(seed=1, max_tokens=80, logit_bias={end or 0: -100.0}, ignore_eos=True)
    closed = {}
    for effort in ("minimal", "low", "medium", "high"):
        done = answers(llm, [prepare(llm, None, Thinking(effort=effort))], [params])[0]
        assert done.finish_details is not None
        assert done.finish_details.close_kind == "hard"
        closed[effort] = done.token_ids.index(end or -1)
        assert len(done.token_ids) == 80
    assert closed == {"minimal": 2, "low": 8, "medium": 31, "high": 61}  # of 60 tokens, plus "\n"


def test_a_thought_without_a_budget_is_not_limited(llm: LLM) -> None:
    prompt = prepare(llm, None, Thinking(enabled=True))
    assert prompt.new_constraint(100) is None
    done = answers(llm, [prompt], [SamplingParams(seed=1, max_tokens=20, ignore_eos=True)])[0]
    assert done.finish_details is not None
    assert done.finish_details.close_kind == "natural"


def test_a_begun_answer_and_its_rest_match_the_schema_together(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [12, True, None]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    begins = ["{", '{"a"', '{"a": t', '{"a": null, "b": true}']
    prompts = [
        llm.prepare_chat(
            Conversation(
                messages=[
                    {"role": "user", "content": "Go."},
                    {"role": "assistant", "content": begun},
                ],
                output_format=OutputFormat(kind="json_schema", value=schema),
                continues=True,
            )
        )
        for begun in begins
    ]
    params = [SamplingParams(seed=seed, max_tokens=MOST) for seed in range(len(begins))]
    for begun, said in zip(begins, answers(llm, prompts, params), strict=True):
        assert said.finish_reason == "stop"
        jsonschema.validate(json.loads(begun + said.text), schema)
