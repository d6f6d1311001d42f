"""Messages with calls and results, in the forms that chat templates accept."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.text.conversation import Tool
from headroom.text.tool_formats import KNOWN_FORMATS, SHORT_ID
from headroom.text.tool_history import (
    arguments_of,
    calls_of,
    history_turns,
    merged_turns,
    one_call_each,
    spelled_turns,
    with_objects,
    without_system,
)

LONG = replace(KNOWN_FORMATS[0], short_ids=False)
SHORT = replace(KNOWN_FORMATS[0], short_ids=True)


def call(name: str, id: str | None = None, arguments: Any = "{}") -> dict[str, Any]:
    given = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return given if id is None else {"id": id, **given}


def asks(*calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


def result(id: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_an_object_or_stay_as_they_are(given: Any, found: Any) -> None:
    assert arguments_of(call("f", arguments=given)) == found


def test_only_calls_of_an_assistant_with_a_function_count() -> None:
    good = call("f")
    assert calls_of(asks(good, {"id": "x"})) == [good]
    assert calls_of({"role": "user", "tool_calls": [good]}) == []
    assert calls_of({"role": "assistant", "tool_calls": None}) == []
    assert calls_of({"role": "assistant", "content": "hi"}) == []


def test_calls_are_joined_to_the_text_before_them() -> None:
    said = {"role": "assistant", "content": "Let me look."}
    found = merged_turns(
        [said, asks(call("a", "1")), asks(call("b", "2"), text="And?"), result("1")]
    )
    assert [turn["role"] for turn in found] == ["assistant", "tool"]
    assert found[0]["content"] == "Let me look.\n\nAnd?"
    assert [x["id"] for x in found[0]["tool_calls"]] == ["1", "2"]


def test_two_answers_without_calls_stay_apart() -> None:
    said = {"role": "assistant", "content": "One."}
    assert merged_turns([said, said]) == [said, said]


def test_results_get_the_name_of_what_was_called_and_arguments_become_objects() -> None:
    given = [asks(call("look", "1", '{"at": "sea"}')), result("1"), result("2")]
    asked, known, unknown = history_turns(given, LONG)
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "sea"}}
    assert (known["name"], unknown["name"]) == ("look", "unknown")
    assert given[0]["tool_calls"][0]["function"]["arguments"] == '{"at": "sea"}'  # not changed


def test_empty_lists_of_calls_and_empty_results_are_made_plain() -> None:
    answer = {"role": "assistant", "content": "Hi.", "tool_calls": []}
    found = history_turns([answer, {**result("1"), "content": None}], LONG)
    assert found[0] == {"role": "assistant", "content": "Hi."}
    assert found[1]["content"] == ""


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6, unique=True))
def test_short_ids_fit_their_template_and_results_still_find_their_calls(ids: list[str]) -> None:
    messages = [asks(*(call(f"f{i}", id) for i, id in enumerate(ids))), *map(result, ids)]
    asked, *results = history_turns(messages, SHORT)
    short = [x["id"] for x in asked["tool_calls"]]
    assert all(SHORT_ID.fullmatch(x) for x in short)
    assert [x["tool_call_id"] for x in results] == short
    assert len(set(short)) == len(ids)
    for long, found in zip(ids, short, strict=True):
        assert long == found or not SHORT_ID.fullmatch(long)


def test_arguments_that_are_no_object_are_wrapped() -> None:
    turns = [asks(call("f", arguments=["x"]), call("g", arguments={"a": 1})), result("1")]
    found = with_objects(turns)
    assert [x["function"]["arguments"] for x in found[0]["tool_calls"]] == [
        {"arguments": ["x"]},
        {"a": 1},
    ]
    assert found[1] is turns[1]


@given(st.permutations(["1", "2", "3"]), st.integers(0, 3))
def test_each_of_several_calls_is_followed_by_its_result(order: list[str], answered: int) -> None:
    messages = [asks(*(call(f"f{i}", i) for i in "123"), text="Well."),
                *(result(id, f"of {id}") for id in order[:answered]),
                {"role": "user", "content": "Go on."}]  # fmt: skip
    found = one_call_each(messages)
    assert found[-1] == messages[-1]
    expected: list[Any] = []
    for id in "123":
        expected.append(("assistant", id))
        if id in order[:answered]:
            expected.append(("tool", id))
    seen = [
        (turn["role"], turn["tool_calls"][0]["id"] if calls_of(turn) else turn["tool_call_id"])
        for turn in found[:-1]
    ]
    assert seen == expected
    assert [turn["content"] for turn in found if calls_of(turn)] == ["Well.", "", ""]


def test_for_templates_without_tools_calls_and_results_become_text() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, "here."]},
        asks(call("look", "1", '{"at": "é"}'), text="Yes."),
        result("1", "sea"),
        result("2", "sky"),
        {"role": "user", "content": "Thanks."},
    ]
    found = spelled_turns(messages, ())
    assert [turn["role"] for turn in found] == ["user", "assistant", "user", "user"]
    text = found[1]["content"]
    assert text.startswith("Yes.\n<tool_call>\n")
    written = text.removeprefix("Yes.\n<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(written) == {"name": "look", "arguments": {"at": "é"}}
    assert found[2] == {
        "role": "user",
        "content": "<tool_response>\nsea\n</tool_response>\n<tool_response>\nsky\n</tool_response>",
    }
    assert all(set(turn) == {"role", "content"} for turn in found)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_system_message_explains_the_tools(system: str | None) -> None:
    first = [] if system is None else [{"role": "system", "content": system}]
    tool = Tool(name="look", description="Looks {around}.")
    found = spelled_turns([*first, {"role": "user", "content": "Hi"}], [tool])
    assert [turn["role"] for turn in found] == ["system", "user"]
    text = found[0]["content"]
    assert text.startswith("Be brief.\n\nYou can" if system else "You can")
    line = next(line for line in text.splitlines() if line.startswith('{"type"'))
    assert json.loads(line) == tool.for_template()
    assert '{"name": "NAME", "arguments": {"KEY": "VALUE"}}' in text


def test_a_system_message_moves_into_the_first_question() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello."}
    assert without_system([system, user, answer]) == [
        {"role": "user", "content": "Be brief.\n\nHi"},
        answer,
    ]
    for turns in ([user, answer], [system], [system, answer, user]):
        assert without_system(turns) == turns


def test_a_result_that_comes_after_another_message_stays_there() -> None:
    question = {"role": "user", "content": "And?"}
    messages = [asks(call("f", "1"), call("g", "2")), result("1"), question, result("2")]
    found = one_call_each(messages)
    assert [turn["role"] for turn in found] == ["assistant", "tool", "assistant", "user", "tool"]
    assert found[1:2] + found[3:] == messages[1:]


def test_one_call_and_its_result_stay_as_they_are() -> None:
    messages = [asks(call("f", "1"), text="Well."), result("1")]
    assert one_call_each(messages) == messages


def test_of_two_results_with_one_id_each_goes_to_a_call() -> None:
    messages = [asks(call("f", "1"), call("g", "1")), result("1", "a"), result("1", "b")]
    found = one_call_each(messages)
    assert [turn["content"] for turn in found if turn["role"] == "tool"] == ["a", "b"]


def test_calls_without_an_id_or_a_function_s_name_are_kept() -> None:
    nameless = {"id": 7, "function": "look"}
    (turn,) = history_turns([asks({"function": {"name": "now"}}, nameless)], SHORT)
    assert turn["tool_calls"] == [
        {"type": "function", "function": {"name": "now", "arguments": {}}},
        {"type": "function", "function": {"name": None, "arguments": {}}},
    ]
    (spelled,) = spelled_turns([asks(nameless, text="")], ())
    assert spelled["content"] == ('<tool_call>\n{"name": null, "arguments": {}}\n</tool_call>')


def test_a_result_keeps_its_own_name_and_text() -> None:
    named = {**result("1", "sea"), "name": "peek"}
    found = history_turns([asks(call("look", "1")), named], LONG)[1]
    assert (found["name"], found["content"]) == ("peek", "sea")
    nameless = {"role": "tool", "content": "sea"}
    assert history_turns([nameless], LONG) == [nameless]


def test_an_id_with_half_a_character_is_shortened_too() -> None:
    (asked,) = history_turns([asks(call("f", "\ud800"))], SHORT)
    assert SHORT_ID.fullmatch(asked["tool_calls"][0]["id"])


def test_a_message_of_calls_adds_what_the_answer_before_it_does_not_say() -> None:
    said = {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."}
    asked = {**asks(call("a", "1")), "reasoning_content": "No.", "model": "m"}
    (merged,) = merged_turns([said, asked])
    assert (merged["reasoning_content"], merged["model"]) == ("Hm.", "m")
    assert merged["content"] == "Well."
    assert merged_turns([said, {"role": "user", "content": "q"}])[0] is said


def test_results_of_different_turns_are_messages_of_their_own() -> None:
    messages = [result("1", "sea"), asks(call("look", "2"), text="On."), result("2", "sky")]
    found = spelled_turns(messages, ())
    assert [turn["role"] for turn in found] == ["user", "assistant", "user"]
    assert found[0]["content"] == "<tool_response>\nsea\n</tool_response>"
    assert all(set(turn) == {"role", "content"} for turn in found)


def test_a_system_message_moves_with_all_its_parts() -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "Be"}, "brief.", {"x": 1}]}
    user = {"role": "user", "content": None}
    assert without_system([system, user]) == [{"role": "user", "content": "Be\nbrief.\n\n"}]
