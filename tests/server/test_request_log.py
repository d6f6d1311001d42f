"""The log of requests, and the ids of requests."""

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.options import Options
from tests.server.fakes import FakeLLM, serving, wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "secret words"}]}
SECONDS = r"\d+\.\d{3} s"


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Return the log's lines about requests, as soon as there are so many."""

    def found() -> list[str]:
        return [text for text in caplog.messages if text.startswith("request: ")]

    wait_until(lambda: len(found()) >= count)
    return found()


def test_a_line_tells_what_was_asked_and_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headroom.server")
    options = Options(port=0, api_key="a key of mine")
    with serving(FakeLLM(), options) as server:
        headers = {"authorization": "Bearer a key of mine"}
        for stream in (False, True):
            answer = httpx.post(
                server.address + CHAT, json={**BODY, "stream": stream}, headers=headers
            )
            assert answer.headers["x-request-id"].startswith("req_")
        written = lines(caplog, 2)
        httpx.get(server.address + "/health")
        assert lines(caplog, 3)[2].startswith("request: GET /health 200, ")
    for line in written:
        assert re.fullmatch(
            rf"request: POST {CHAT} 200, 14 \+ 14 tokens, first after {SECONDS}, {SECONDS}, "
            r"key default, req_[0-9a-f]{32}",
            line,
        )
    assert "secret words" not in caplog.text
    assert "a key of mine" not in caplog.text
    levels = [r.levelno for r in caplog.records if r.getMessage().startswith("request: ")]
    assert levels == [logging.INFO, logging.INFO, logging.DEBUG]


def test_a_client_that_leaves_is_logged_with_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headroom.server")
    llm = FakeLLM()
    llm.engine.pause_s = 0.05
    with serving(llm, Options(port=0)) as server:
        url = server.address + CHAT
        with httpx.stream("POST", url, json={**BODY, "stream": True}) as response:
            next(response.iter_text())
        (line,) = lines(caplog, 1)
    assert re.match(rf"request: POST {CHAT} 499, 14 \+ \d+ tokens, ", line)


def test_a_clients_own_id_is_taken_over_if_it_is_harmless(shared: httpx.Client) -> None:
    mine = shared.get("/health", headers={"x-request-id": "trace-7.a:b_c"})
    assert mine.headers["x-request-id"] == "trace-7.a:b_c"
    for odd in ("", "a b", "x" * 129, "é".encode("latin-1")):
        other = shared.get("/health", headers={"x-request-id": odd})
        assert other.headers["x-request-id"].startswith("req_")


def test_an_anthropic_answer_carries_the_same_id_twice(shared: httpx.Client) -> None:
    answer = shared.post("/v1/messages", json={**BODY, "max_tokens": 5})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    wrong = shared.post("/v1/messages", json={})
    assert wrong.json()["request_id"] == wrong.headers["x-request-id"]


def test_a_long_or_strange_path_is_neither_repeated_nor_written_whole(
    shared: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headroom.server")
    response = shared.get("/" + "x" * 50_000)
    assert response.status_code == 404
    assert len(response.content) < 400
    shared.get("/a%0arequest:%20forged")
    wait_until(lambda: "forged" in caplog.text and "xxx" in caplog.text)
    (long,) = (line for line in caplog.messages if "xxx" in line)
    (strange,) = (line for line in caplog.messages if "forged" in line)
    assert len(long) < 400
    assert "/a\\nrequest: forged 404" in strange
    assert "\n" not in strange


def test_a_request_beyond_the_limit_of_its_key_is_logged_with_the_keys_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headroom.server")
    keys = tmp_path / "keys.toml"
    keys.write_text("[alice]\nkey = 'a'\nrequests_per_minute = 1\n")
    with serving(FakeLLM(), Options(port=0, api_keys=str(keys))) as server:
        for _ in range(2):
            httpx.post(server.address + CHAT, json=BODY, headers={"authorization": "Bearer a"})
        refused = lines(caplog, 2)[1]
    assert refused.startswith(f"request: POST {CHAT} 429, ")
    assert ", key alice, " in refused
