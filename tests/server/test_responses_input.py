"""The items of /v1/responses become messages."""

from typing import Any

from headroom.server.offered_tools import OfferedTools
from headroom.server.responses_input import ItemBody, make_messages


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    bodies = [ItemBody.model_validate(item) for item in items]
    return make_messages([], bodies, instructions, OfferedTools())


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id: str, result: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": result}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]}


def test_instructions_at_the_beginning_become_one_system_message() -> None:
    chat = messages(
        said("developer", "two"), said("system", "three"), said("user", "hi"), instructions="one"
    )
    assert chat == [
        {"role": "system", "content": "one\n\ntwo\n\nthree"},
        {"role": "user", "content": "hi"},
    ]
    later = messages(said("user", "hi"), said("developer", "now"), said("developer", "and"))
    assert [turn["content"] for turn in later] == ["hi", "now", "and"]


def test_parts_of_a_message_are_lines() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    chat = messages({"role": "user", "content": parts}, refused)
    assert [turn["content"] for turn in chat] == ["a\nb", "no"]


def test_what_one_answer_consists_of_becomes_one_message() -> None:
    chat = messages(
        said("user", "hi"),
        thought("I must look."),
        said("assistant", "I look."),
        call("1"),
        call("2"),
        output("2", "B"),
        output("1", "A"),
        thought("I know."),
        call("3"),
        output("3", "C"),
        said("assistant", "Done."),
    )
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [turn["role"] for turn in chat] == roles
    first, second = chat[1], chat[4]
    assert (first["reasoning_content"], first["content"]) == ("I must look.", "I look.")
    assert [made["id"] for made in first["tool_calls"]] == ["1", "2"]
    assert [turn["tool_call_id"] for turn in chat[2:4]] == ["2", "1"]
    assert (second["reasoning_content"], second["content"]) == ("I know.", "")
    assert "reasoning_content" not in chat[6]


def test_a_thought_after_a_text_begins_a_new_message() -> None:
    chat = messages(
        said("assistant", "One."), thought("a"), thought("b"), said("assistant", "Two.")
    )
    assert [turn["content"] for turn in chat] == ["One.", "Two."]
    assert chat[1]["reasoning_content"] == "a\n\nb"


def test_whole_thoughts_go_before_their_summary() -> None:
    item = {**thought("short"), "content": [{"type": "reasoning_text", "text": "long"}]}
    assert messages(item)[0]["reasoning_content"] == "long"
    assert messages(said("user", "hi"), {"type": "reasoning", "id": "x", "summary": []}) == [
        {"role": "user", "content": "hi"}
    ]


def test_pictures_in_outputs_of_tools_are_named_and_left_out() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "x"}]
    chat = messages(call("1"), output("1", parts))
    assert chat[1]["content"] == "see\n[input_image left out: this model reads text only]"


def test_a_shell_call_is_a_call() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    item = {"type": "local_shell_call", "id": "lsh_1", "call_id": "1", "action": action}
    answer = {"type": "local_shell_call_output", "id": "1", "output": "a.txt"}
    turn, result = messages(item, answer)
    assert turn["tool_calls"][0]["function"]["name"] == "local_shell"
    assert '"command": ["ls"]' in turn["tool_calls"][0]["function"]["arguments"]
    assert (result["tool_call_id"], result["content"]) == ("1", "a.txt")


def test_the_arguments_of_an_earlier_call_may_be_an_object_or_null() -> None:
    bare = {"type": "function_call", "call_id": "3", "name": "f"}
    calls = [{**call("1"), "arguments": {"a": 1}}, {**call("2"), "arguments": None}, bare]
    (turn,) = messages(*calls)
    made = [one["function"]["arguments"] for one in turn["tool_calls"]]
    assert made == ['{"a": 1}', "{}", "{}"]


def test_what_a_server_did_by_itself_is_skipped() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
    assert messages(search, said("user", "hi")) == [{"role": "user", "content": "hi"}]
