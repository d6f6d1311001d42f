"""Anthropic's messages as turns of a chat template."""

from typing import Any

import pytest

from headroom.server.anthropic_history import (
    AnthropicMessageBody,
    History,
    TextBlock,
    hidden_signature,
    hidden_thought,
    system_text,
)
from headroom.server.refusals import RefusalError


def history(*messages: dict[str, Any], system: str = "") -> History:
    return History(system, [AnthropicMessageBody.model_validate(message) for message in messages])


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def call(identity: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": "look", "input": arguments}


def result(identity: str, content: Any = None, **more: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": identity, **more}
    return block if content is None else {**block, "content": content}


def test_a_session_with_tools_becomes_turns() -> None:
    turns = history(
        user(text("One."), text("Two.")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("I look."),
                call("a", city="Köln", days=[1]),
                call("b"),
            ],
        },
        user(text("And?"), result("a", "grey"), result("b", [text("x"), text("y")], is_error=True)),
        system="Be short.",
    ).turns
    look = {"name": "look", "arguments": '{"city": "Köln", "days": [1]}'}
    assert turns == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One.\nTwo."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": look},
                {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": "grey"},
        {"role": "tool", "tool_call_id": "b", "name": "look", "content": "Error: x\ny"},
        {"role": "user", "content": "And?"},
    ]


def test_blocks_of_an_answer_go_on_where_the_one_before_ended() -> None:
    answer = {"role": "assistant", "content": [text("The sky"), text(" is grey.")]}
    assert history(user("Hm?"), answer, user("Oh.")).turns[1]["content"] == "The sky is grey."


def test_a_result_may_be_empty() -> None:
    turns = history(
        user("Go."), {"role": "assistant", "content": [call("a")]}, user(result("a"))
    ).turns
    assert turns[-1] == {"role": "tool", "tool_call_id": "a", "name": "look", "content": ""}


def test_a_picture_that_a_tool_returned_is_named_instead_of_shown() -> None:
    picture = {"type": "image", "source": {"type": "base64", "data": ""}}
    turns = history(
        user("Go."),
        {"role": "assistant", "content": [call("a")]},
        user(result("a", [text("Here:"), picture])),
    ).turns
    assert turns[-1]["content"] == "Here:\n[image left out: this model reads text only]"


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    said = [{"role": "assistant", "content": [text(words), call(words)]} for words in ("x", "y")]
    turns = history(user("a"), user("b"), *said, user(result("x", "1"), result("y", "2"))).turns
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert [turn["content"] for turn in turns] == ["a\nb", "x\ny", "1", "2"]
    assert [made["id"] for made in turns[1]["tool_calls"]] == ["x", "y"]


def test_a_later_system_message_is_marked_in_the_user_s_turn() -> None:
    system = {"role": "system", "content": "Agents: none."}
    marked = "<system-reminder>\nAgents: none.\n</system-reminder>"
    assert history(user("Hi."), system).turns == [{"role": "user", "content": f"Hi.\n{marked}"}]
    assert history(system, user("Hi."), system="Be short.").turns == [
        {"role": "system", "content": "Be short.\nAgents: none."},
        {"role": "user", "content": "Hi."},
    ]


def test_the_changing_billing_line_does_not_reach_the_prompt() -> None:
    def prompt(version: str) -> str:
        billing = f"x-anthropic-billing-header: cc_version=2.1.{version}; cc_entrypoint=sdk-cli;"
        blocks = [billing, "You are an agent.", "\nBe short."]
        return system_text([TextBlock(type="text", text=words) for words in blocks])

    assert prompt("197.41f") == prompt("198.0aa") == "You are an agent.\n\nBe short."
    joined = "x-anthropic-billing-header: a=b;\nYou are an agent."
    assert system_text([TextBlock(type="text", text=joined)]) == "You are an agent."
    quoted = "Say x-anthropic-billing-header: no."
    assert system_text([TextBlock(type="text", text=quoted)]) == quoted


def test_only_the_assistant_s_words_at_the_end_are_continued() -> None:
    assert history(user("a"), {"role": "assistant", "content": "b"}).continues
    assert not history(user("a"), {"role": "assistant", "content": "b"}, user("c")).continues


def test_a_result_of_no_call_is_refused() -> None:
    with pytest.raises(RefusalError, match=r"messages\[1\]\.content: .*'b'") as refused:
        history(user("a"), user(result("b", "x")))
    assert (refused.value.status, refused.value.param) == (400, "messages[1].content")


@pytest.mark.parametrize("thought", ["", "Hm. 👍\n" * 1000])
def test_a_signature_carries_a_hidden_thought(thought: str) -> None:
    assert hidden_thought(hidden_signature(thought)) == thought


@pytest.mark.parametrize("signature", ["", "abc", "hidden.", "hidden.!", "hidden.AAAA"])
def test_other_signatures_carry_nothing(signature: str) -> None:
    assert hidden_thought(signature) == ""


def document(words: str, **more: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": words}
    return {"type": "document", "source": source, "citations": {"enabled": True}, **more}


def found(*lines: str) -> dict[str, Any]:
    content = [text(line) for line in lines]
    return {
        "type": "search_result",
        "source": "https://a.example",
        "title": "A",
        "content": content,
    }


def test_documents_and_search_results_of_text_are_read() -> None:
    parts = {"type": "document", "source": {"type": "content", "content": [text("c"), text("d")]}}
    whole = {"type": "document", "source": {"type": "content", "content": "e"}}
    given = user(
        document("a b", title="T", context="Old."), parts, whole, found("x", "y"), text("?")
    )
    assert history(given).turns == [
        {"role": "user", "content": "T\nOld.\na b\nc\nd\ne\nA\nhttps://a.example\nx\ny\n?"}
    ]


def test_tools_return_documents_and_search_results() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "data": ""}}
    returned = [document("a"), found("x"), pdf, {"type": "document"}]
    turns = history(
        user("Go."), {"role": "assistant", "content": [call("a")]}, user(result("a", returned))
    ).turns
    left_out = "[document left out: this model reads text only]"
    assert turns[-1]["content"] == f"a\nA\nhttps://a.example\nx\n{left_out}\n{left_out}"


def test_what_a_server_did_by_itself_is_skipped() -> None:
    answer = [
        text("I search."),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "x"}]},
        {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
        text(" Done."),
    ]
    turns = history(user("Go."), {"role": "assistant", "content": answer}, user("Thanks.")).turns
    assert [turn["content"] for turn in turns] == ["Go.", "I search. Done.", "Thanks."]


@pytest.mark.parametrize(
    ("given", "read"), [(None, "{}"), ('{"city": "Rome"}', '{"city": "Rome"}')]
)
def test_the_input_of_an_earlier_call_may_be_text_or_null(given: Any, read: str) -> None:
    answer = {"role": "assistant", "content": [{**call("a"), "input": given}]}
    turns = history(user("Go."), answer, user(result("a", "1"))).turns
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == read
