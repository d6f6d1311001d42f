"""Conversations become limits of answers: formats, tool calls, or both."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from headroom.errors import RequestError
from headroom.text.answer_limits import AnswerLimits
from headroom.text.answer_parser import AnswerParser, AnswerParts, join_calls
from headroom.text.conversation import (
    Conversation,
    OutputFormat,
    Thinking,
    Tool,
    ToolChoice,
    text_tool,
)
from headroom.text.grammar import GrammarCompiler
from headroom.text.reasoning import find_reasoning
from headroom.text.tool_formats import ToolFormat, find_tool_format
from tests.text.tool_models import TOOL_MODELS, tool_template, tool_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = Tool(name="count", parameters=SCHEMA)
OTHER = Tool(name="stop", parameters=SCHEMA)
FORMAT = OutputFormat(kind="json_schema", value={**SCHEMA, "maxProperties": 1})


def walk(model: str, seed: int, chat: Conversation) -> AnswerParts | None:
    """Return a random answer to a chat, read as its client would read it; None without an end."""
    tokenizer, form = tool_tokenizer(model), form_of(model)
    limits = AnswerLimits.of(compiler(model), chat, None, form, prompt="", room=500)
    constraint = limits.begin(None)
    assert constraint is not None
    dice, taken = random.Random(seed), []
    for _ in range(500):
        mask = constraint.mask()
        assert mask is not None
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        ends = [token for token in allowed if token in tokenizer.stop_ids]
        token = dice.choice(ends if ends and dice.random() < 0.5 else allowed)
        if token in tokenizer.stop_ids:
            parser = AnswerParser(tools=chat.tools, format=form)
            return parser.push(tokenizer.decode(taken)) + parser.finish()
        constraint.advance(token)
        taken.append(token)
    return None


def form_of(model: str) -> ToolFormat:
    form = find_tool_format(tool_tokenizer(model), tool_template(model))
    assert form is not None
    return form


def compiler(model: str) -> GrammarCompiler:
    tokenizer = tool_tokenizer(model)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def chat(**asked: Any) -> Conversation:
    return Conversation(messages=(), **asked)


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_a_required_call_comes_and_fits_its_schema(model: str) -> None:
    wanted = chat(tools=(TOOL, OTHER), tool_choice=ToolChoice(mode="required", name="count"))
    found = [walk(model, seed, wanted) for seed in range(4)]
    ended = [parts for parts in found if parts is not None]
    assert ended
    for parts in ended:
        calls = join_calls(parts.calls)
        assert parts.text == ""
        assert {call.name for call in calls} == {"count"}
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA)


@pytest.mark.parametrize("model", TOOL_MODELS)
def test_with_a_format_and_tools_an_answer_is_a_call_or_text_of_the_format(model: str) -> None:
    wanted = chat(tools=(TOOL,), output_format=FORMAT)
    kinds = set()
    for seed in range(12):
        parts = walk(model, seed, wanted)
        if parts is None:
            continue
        kinds.add("calls" if parts.calls else "text")
        if parts.calls:
            assert parts.text == ""
        else:
            jsonschema.validate(json.loads(parts.text), SCHEMA)
    assert kinds == {"calls", "text"}


@pytest.mark.parametrize(
    "choice", [ToolChoice(mode="none"), ToolChoice(mode="auto")], ids=["none", "auto"]
)
def test_tools_that_need_not_be_called_limit_nothing(choice: ToolChoice) -> None:
    asked = chat(tools=(TOOL,), tool_choice=choice)
    limits = AnswerLimits.of(compiler("qwen3"), asked, None, form_of("qwen3"), prompt="", room=500)
    assert limits.begin(None) is None


def test_without_tools_an_answer_matches_the_format() -> None:
    asked = chat(tools=(TOOL,), tool_choice=ToolChoice(mode="none"), output_format=FORMAT)
    for seed in range(5):
        parts = walk("qwen3", seed, asked)
        assert parts is not None
        jsonschema.validate(json.loads(parts.text), SCHEMA)


def test_a_call_cannot_be_required_of_a_model_without_a_call_format() -> None:
    asked = chat(tools=(TOOL,), tool_choice=ToolChoice(mode="required"))
    with pytest.raises(RequestError, match="cannot write tool calls") as refused:
        AnswerLimits.of(compiler("qwen3"), asked, None, None, prompt="", room=500)
    assert refused.value.param == "tool_choice"


def test_the_tool_whose_schema_cannot_be_compiled_is_named() -> None:
    wrong = Tool(
        name="bad",
        strict=True,
        parameters={"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
        param="tools[1].function.parameters",
    )
    with pytest.raises(RequestError, match=r"at /properties/a: .*not") as refused:
        AnswerLimits.of(
            compiler("qwen3"),
            chat(tools=(TOOL, wrong)),
            None,
            form_of("qwen3"),
            prompt="",
            room=500,
        )
    assert refused.value.param == "tools[1].function.parameters"


def deep_schema() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("part", "reason"), [(deep_schema(), "too deeply"), ({"multipleOf": 99999991}, "multipleOf")]
)
def test_the_schema_of_a_tool_that_would_compile_for_ever_is_refused(
    part: dict[str, Any], reason: str
) -> None:
    tool = Tool(name="bad", strict=True, parameters={"properties": {"a": part}})
    with pytest.raises(RequestError, match=reason) as refused:
        AnswerLimits.of(
            compiler("qwen3"), chat(tools=(tool,)), None, form_of("qwen3"), prompt="", room=500
        )
    assert (refused.value.param or "").startswith("tools")


def test_calls_follow_the_thought() -> None:
    model = "qwen35"
    tokenizer = tool_tokenizer(model)
    reasoning = find_reasoning(tokenizer, tool_template(model))
    assert reasoning is not None
    asked = chat(
        tools=(TOOL,), tool_choice=ToolChoice(mode="required"), thinking=Thinking(budget=3)
    )
    limits = AnswerLimits.of(
        compiler(model), asked, reasoning, form_of(model), prompt="<think>\n", room=500
    )
    constraint = limits.begin(None)
    assert constraint is not None
    answer = "abc\n</think>\n\n<tool_call>\n<function=count>\n<parameter=n>\n7\n</parameter>\n"
    for token in tokenizer.encode(answer + "</function>\n</tool_call>", add_bos=False):
        mask = constraint.mask()
        assert mask is None or mask[token // 32] >> (token % 32) & 1
        constraint.advance(token)


@pytest.mark.parametrize("model", ["qwen3", "qwen35", "llama3"])
def test_the_tool_whose_grammar_cannot_be_compiled_is_named(model: str) -> None:
    asked = chat(
        tools=(TOOL, text_tool("shell", "", lark="start: nothing", param="tools[1].format"))
    )
    with pytest.raises(
        RequestError, match=r"of the tool 'shell' cannot be used: .*nothing"
    ) as refused:
        AnswerLimits.of(compiler(model), asked, None, form_of(model), prompt="", room=500)
    assert refused.value.param == "tools[1].format"


def test_bare_json_takes_a_grammar_of_a_tool_or_a_format() -> None:
    tool = text_tool("shell", "", lark='start: "ls"')
    asked = chat(tools=(tool,), output_format=FORMAT)
    with pytest.raises(RequestError, match="cannot be asked for together") as refused:
        AnswerLimits.of(compiler("llama3"), asked, None, form_of("llama3"), prompt="", room=500)
    assert refused.value.param == FORMAT.param
    AnswerLimits.of(compiler("qwen3"), asked, None, form_of("qwen3"), prompt="", room=500)
