"""Bodies of Ollama's API: durations in Go's notation, options, and which call a result answers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headroom.errors import HeadroomError
from headroom.server.ollama_bodies import (
    EmbedBody,
    GenerateBody,
    ModelBody,
    OllamaChatBody,
    OllamaMessageBody,
    OptionsBody,
    read_messages,
    seconds,
)
from headroom.server.service import UNTIL_END
from headroom.server.shelf import NEVER
from headroom.text.conversation import OutputFormat, Thinking

NANOSECONDS = {
    "ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9,
    "h": 3600 * 10**9,
}  # fmt: skip
STEPS = st.tuples(st.integers(0, 10**4), st.integers(0, 999), st.sampled_from(sorted(NANOSECONDS)))


@given(st.lists(STEPS, min_size=1, max_size=4), st.sampled_from(["", "+"]))
def test_a_duration_is_the_sum_of_its_steps(steps: list[tuple[int, int, str]], sign: str) -> None:
    text = sign + "".join(f"{whole}.{part:03}{unit}" for whole, part, unit in steps)
    thousandths = sum((1000 * whole + part) * NANOSECONDS[unit] for whole, part, unit in steps)
    assert seconds(text) == pytest.approx(thousandths / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (0, 0.0),
        ("0", 0.0),
        (90, 90.0),
        ("2.5", 2.5),
        ("1h30m", 5400.0),
        (" 5m ", 300.0),
        ("1.s", 1.0),
        (".5s", 0.5),
        (-1, NEVER),
        ("-1", NEVER),
        ("-1m", NEVER),
    ],
)
def test_durations_are_read_and_negative_ones_mean_for_ever(value: object, found: float) -> None:
    assert seconds(value) == found


@pytest.mark.parametrize(
    "value", ["", "soon", "5 minutes", "m", True, None, [5], float("nan"), "nan", "5d", ".s"]
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises((ValueError, HeadroomError)):
        seconds(value)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, {}),
        ({"temperature": 0, "top_k": -1, "seed": 7}, {"temperature": 0, "top_k": 0, "seed": 7}),
        ({"num_predict": 64.0}, {"max_tokens": 64}),
        ({"num_predict": -1}, {"max_tokens": UNTIL_END}),
        ({"num_predict": 0}, {"max_tokens": UNTIL_END}),
        ({"seed": -5}, {}),
        (
            {"repeat_last_n": 16, "repeat_penalty": 1.2},
            {"penalty_window": 16, "repetition_penalty": 1.2},
        ),
        ({"repeat_last_n": -1}, {"penalty_window": 0}),
        (
            {"repeat_last_n": 0, "repeat_penalty": 1.2},
            {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        ),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": []}, {}),
        ({"stop": ["", "END"]}, {"stop": ("END",)}),
        ({"num_gpu": 99, "main_gpu": 1}, {}),  # of Ollama's loader
    ],
)
def test_options_become_sampling_settings(options: dict[str, Any], found: dict[str, Any]) -> None:
    assert OptionsBody.model_validate(options).sampling() == found


@pytest.mark.parametrize("options", [{"mirostat": 1}, {"typical_p": 0.5}, {"num_predict": 1.5}])
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, HeadroomError)):
        OptionsBody.model_validate(options)


@pytest.mark.parametrize(
    ("think", "found"),
    [
        (None, Thinking(enabled=None)),
        (False, Thinking(enabled=False)),
        ("high", Thinking(enabled=True, effort="high")),
    ],
)
def test_think_is_a_switch_or_a_level(think: object, found: Thinking) -> None:
    body = GenerateBody.model_validate({"model": "m", "think": think})
    assert body.thinking() == found
    with pytest.raises(ValidationError, match="low, medium, high, max"):
        GenerateBody.model_validate({"model": "m", "think": "often"})


@pytest.mark.parametrize(
    ("format", "found"),
    [
        (None, None),
        ("", None),
        ("json", OutputFormat(kind="json_object")),
        ({"type": "object"}, OutputFormat(kind="json_schema", value={"type": "object"})),
    ],
)
def test_a_format_is_json_or_a_schema(format: object, found: OutputFormat | None) -> None:
    assert GenerateBody.model_validate({"model": "m", "format": format}).format == found


def test_the_older_word_for_a_model_is_read() -> None:
    assert ModelBody.model_validate({"name": "m"}).model == "m"
    assert ModelBody.model_validate({"name": "old", "model": "new"}).model == "new"
    with pytest.raises(ValidationError):
        ModelBody.model_validate({"model": " "})


def turn(role: str, **fields: Any) -> OllamaMessageBody:
    return OllamaMessageBody.model_validate({"role": role, **fields})


def call(name: str, id: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "function": {"name": name, "arguments": arguments}}


def test_results_without_ids_find_the_first_open_call_of_their_tool() -> None:
    asked = turn("assistant", tool_calls=[call("look", at="é"), call("hear"), call("look")])
    answers = [turn("tool", tool_name=name, content="x") for name in ("hear", "look", "look")]
    messages = read_messages([asked, *answers])
    made = messages[0]["tool_calls"]
    assert [one["id"] for one in made] == ["call_0_0", "call_0_1", "call_0_2"]
    assert json.loads(made[0]["function"]["arguments"]) == {"at": "é"}
    assert [one["tool_call_id"] for one in messages[1:]] == ["call_0_1", "call_0_0", "call_0_2"]
    assert [one["name"] for one in messages[1:]] == ["hear", "look", "look"]


@pytest.mark.parametrize(
    ("given", "read"), [('{"at": 1}', '{"at": 1}'), ({"at": 1}, '{"at": 1}'), (None, "{}")]
)
def test_the_arguments_of_an_earlier_call_may_be_text_or_null(given: Any, read: str) -> None:
    asked = turn("assistant", tool_calls=[{"function": {"name": "look", "arguments": given}}])
    (message,) = read_messages([asked])
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_results_without_names_answer_the_calls_in_order() -> None:
    asked = turn("assistant", tool_calls=[call("look", "a"), call("hear")])
    messages = read_messages([asked, turn("tool"), turn("tool")])
    assert [(one["tool_call_id"], one["name"]) for one in messages[1:]] == [
        ("a", "look"),
        ("call_0_1", "hear"),
    ]


def test_a_result_that_answers_no_call_says_so_by_its_id() -> None:
    asked = turn("assistant", tool_calls=[call("look", "a")])
    other = turn("tool", tool_call_id="b", name="hear")
    late = turn("tool", tool_name="hear")
    messages = read_messages([asked, other, late])
    assert [one["tool_call_id"] for one in messages[1:]] == ["b", "call_unknown"]


def test_later_calls_replace_open_ones_and_thoughts_go_back() -> None:
    first = turn("assistant", thinking="Hm.", tool_calls=[call("look")])
    second = turn("assistant", tool_calls=[call("look")])
    messages = read_messages([first, second, turn("tool", tool_name="look")])
    assert messages[0]["reasoning_content"] == "Hm."
    assert messages[2]["tool_call_id"] == "call_1_0"


def test_two_tools_of_one_name_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    body = OllamaChatBody.model_validate({"model": "m", "tools": [tool, tool]})
    with pytest.raises(HeadroomError, match="Two tools have the name 'look'"):
        body.conversation()


@pytest.mark.parametrize(
    "fields",
    [
        {"raw": True, "context": [1]},
        {"suffix": "}", "context": [1]},
        {"suffix": "}", "system": "Be brief."},
        {"template": "{{ .Prompt }}"},
        {"images": ["aGk="]},
        {"context": ["one"]},
        {"context": "1 2"},
    ],
)
def test_fields_of_generate_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, HeadroomError)):
        GenerateBody.model_validate({"model": "m", **fields})


def test_a_prompt_is_the_first_turn_after_the_system_text() -> None:
    given = {"model": "m", "prompt": "Hi", "system": "Be brief."}
    assert list(GenerateBody.model_validate(given).conversation().messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_one_text_to_embed_is_a_list_of_one() -> None:
    assert EmbedBody.model_validate({"model": "m", "input": "a"}).input == ["a"]
    assert EmbedBody.model_validate({"model": "m", "input": ["a", "b"]}).input == ["a", "b"]
    with pytest.raises(ValidationError):
        EmbedBody.model_validate({"model": "m", "input": [1]})
