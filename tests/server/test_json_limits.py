"""Bodies with too many JSON values are refused."""

import importlib
import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.server import json_limits, schemas
from headroom.server.json_limits import MOST_CONTAINERS, MOST_VALUES, check_json_size
from headroom.server.refusals import RefusalError
from headroom.server.service import LARGE_BODY_BYTES

texts = st.text(alphabet='[]{},"\\\\ a\\n')
values = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(values)
def test_objects_and_lists_are_counted_exactly(value: Any) -> None:
    count = containers(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "MOST_CONTAINERS", count)
        check_json_size(json.dumps(value).encode())
        patch.setattr(json_limits, "MOST_CONTAINERS", count - 1)
        if count:
            with pytest.raises(RefusalError, match=f"The body has {count} objects and lists"):
                check_json_size(json.dumps(value).encode())


def test_long_texts_and_as_many_token_ids_as_allowed_pass() -> None:
    check_json_size(json.dumps({"text": "[{,}] " * MOST_VALUES}).encode())
    check_json_size(b"[" + b"1," * MOST_VALUES + b"1]")
    with pytest.raises(RefusalError, match="values"):
        check_json_size(b"[" + b"1," * (MOST_VALUES + 1) + b"1]")


def test_an_unclosed_string_takes_no_longer_than_a_closed_one() -> None:
    check_json_size(b'"' + b"\\\\[" * MOST_CONTAINERS)


@pytest.mark.parametrize(
    ("path", "start", "piece"),
    [
        ("/v1/completions", '{"prompt":[', "[]"),
        ("/v1/chat/completions", '{"messages":[', '{"role":"user","content":""}'),
        ("/detokenize", '{"tokens":[', ",".join("1" * (MOST_VALUES // MOST_CONTAINERS))),
    ],
)
def test_a_body_with_too_many_values_is_refused(
    shared: httpx.Client, path: str, start: str, piece: str
) -> None:
    body = start + ",".join([piece] * (MOST_CONTAINERS + 1)) + "]}"
    response = shared.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_body_that_is_not_small_is_parsed_and_checked_in_a_thread(
    shared: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def watch(data: bytes) -> None:
        threads.append(threading.current_thread().name)
        check_json_size(data)

    monkeypatch.setattr(schemas, "check_json_size", watch)
    for size in (1, schemas.SMALL_BODY_BYTES, LARGE_BODY_BYTES):
        assert shared.post("/tokenize", json={"content": "a" * size}).status_code == 200
    wrong = shared.post("/tokenize", json={"content": ["a" * schemas.SMALL_BODY_BYTES]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "content"
    small, *others = [name.partition("_")[0] for name in threads]
    assert not small.startswith("prepare")
    assert others == ["prepare", "prepare-large", "prepare"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", "headroom.server.openai_chat.ChatBody"),
        ("/v1/messages", "headroom.server.anthropic_messages.MessagesBody"),
        ("/v1/responses", "headroom.server.responses.ResponseBody"),
        ("/api/chat", "headroom.server.ollama.OllamaChatBody"),
    ],
)
def test_a_conversation_is_read_in_a_thread(
    shared: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: str
) -> None:
    threads: list[str] = []
    module, _, kind = body.rpartition(".")
    schema = getattr(importlib.import_module(module), kind)
    read = schema.conversation

    def watch(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(schema, "conversation", watch)
    turns = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": "any", "stream": False}
    if path == "/v1/messages":
        asked["max_tokens"] = 9
    field = "input" if path == "/v1/responses" else "messages"
    answer = shared.post(path, json={**asked, field: turns})
    assert answer.status_code == 200, answer.text
    assert [name.partition("_")[0] for name in threads] == ["prepare"]
