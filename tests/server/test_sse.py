"""Streams get comments while they are silent, and end when the client leaves."""

import json
import socket
import threading
import time

import httpx
import pytest

from headroom.options import Options
from tests.server.fakes import FakeLLM, events_of, wait_until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "n": 2}


@pytest.fixture
def options() -> Options:
    return Options(port=0, keep_alive=0.05)


def test_a_silent_stream_is_kept_alive_while_the_prompt_is_read(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.prefill_s = 0.4
    response = client.post(CHAT, json={**BODY, "stream": True})
    opening, _, rest = response.text.partition(": keep-alive\n\n")
    assert '"role":"assistant"' in opening
    assert 3 <= rest.count(": keep-alive\n\n") + 1 <= 9
    assert events_of(response.text)[-1] == "[DONE]"


def test_a_stream_that_is_not_silent_has_no_comments(client: httpx.Client) -> None:
    assert "keep-alive" not in client.post(CHAT, json={**BODY, "stream": True}).text


def test_a_client_that_leaves_a_stream_ends_its_answers(client: httpx.Client, llm: FakeLLM) -> None:
    llm.engine.pause_s = 0.1
    with client.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: llm.engine.finished["cancelled"] == 2, timeout_s=1.0)


def test_a_client_that_leaves_during_the_prompt_ends_its_answers(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.prefill_s = 60.0
    with client.stream("POST", CHAT, json={**BODY, "stream": True}):
        pass
    wait_until(lambda: llm.engine.finished["cancelled"] == 2, timeout_s=2.0)


def test_a_client_that_leaves_before_a_whole_answer_ends_it(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.prefill_s = 60.0
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=BODY, timeout=0.3)
    wait_until(lambda: llm.engine.finished["cancelled"] == 2, timeout_s=2.0)
    text = client.get("/metrics").text
    assert 'endpoint="/v1/chat/completions",status="499"' in text


def test_a_client_that_leaves_in_the_middle_of_its_body_starts_nothing(
    client: httpx.Client, llm: FakeLLM
) -> None:
    where = (client.base_url.host, client.base_url.port or 0)
    data = json.dumps(BODY).encode()
    with socket.create_connection(where) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[:10])
        time.sleep(0.1)
    assert client.get("/health").status_code == 200
    assert llm.engine.requests == []


def test_a_stream_that_nobody_reads_does_not_hold_up_others(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.words = "x" * 3000
    with client.stream("POST", CHAT, json={**BODY, "stream": True}):
        answer = client.post(CHAT, json={**BODY, "max_tokens": 1}, timeout=5)
    assert answer.status_code == 200


def test_many_streams_run_at_once_and_each_gets_its_own_words(
    client: httpx.Client, llm: FakeLLM
) -> None:
    llm.engine.pause_s = 0.005
    texts: dict[int, str] = {}

    def ask(length: int) -> None:
        body = {"prompt": "a", "stream": True, "max_tokens": length}
        chunks = events_of(client.post("/v1/completions", json=body).text)[:-1]
        texts[length] = "".join(chunk["choices"][0]["text"] for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(length,)) for length in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {length: llm.engine.words[:length] for length in range(1, 13)}
