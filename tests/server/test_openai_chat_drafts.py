"""Guesses over HTTP: the field `draft`, what answers and metrics tell, and what is refused."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headroom.llm import LLM
from headroom.options import Options
from tests.server.fakes import serving
from tests.synth_models import write_model

ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
CHAT = {**ASKED, "messages": [{"role": "user", "content": "one two one two one two"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**ASKED, "prompt": "one two one two one two"},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "one two one two", "temperature": 0, "max_output_tokens": 40},
}


@pytest.fixture(scope="module", params=["ngram", None])
def drafted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, str | None]]:
    """A server that was started with or without guesses, and with which."""
    path = write_model("qwen35", "q8_0", tmp_path_factory.mktemp("http"), few_layers=True)
    with (
        LLM(str(path), context=256, threads=1, draft=request.param, draft_always=True) as llm,
        serving(llm, Options(port=0)) as server,
        httpx.Client(base_url=server.address, timeout=60) as http,
    ):
        yield http, request.param


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))


@pytest.mark.parametrize("path", BODIES)
def test_a_request_chooses_its_guesses_and_others_are_refused(
    drafted: tuple[httpx.Client, str | None], path: str
) -> None:
    client, started_with = drafted
    for draft in ("none", None, started_with):
        before = metric(client, "headroom_draft_tokens_total")
        answer = client.post(path, json={**BODIES[path], "model": "x", "draft": draft})
        assert answer.status_code == 200, answer.text
        guessed = metric(client, "headroom_draft_tokens_total") - before
        if draft == "none" or started_with is None:
            assert guessed == 0
    wrong = "ngram" if started_with is None else "oracle"
    for value in (wrong, 7):
        answer = client.post(path, json={**BODIES[path], "model": "x", "draft": value})
        assert answer.status_code == 400
        assert "draft" in answer.text


def test_an_answer_is_the_same_with_guesses_and_tells_how_many_were_right(
    drafted: tuple[httpx.Client, str | None],
) -> None:
    client, started_with = drafted
    # The greedy answers of a small random model repeat themselves.
    found = {
        draft: client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 150, "draft": draft})
        for draft in ("none", started_with)
    }
    texts = [answer.json()["choices"][0]["message"] for answer in found.values()]
    assert all(text == texts[0] for text in texts)
    for draft, answer in found.items():
        timings = answer.json()["timings"]
        if draft == "ngram":
            assert 0 < timings["draft_tokens_accepted"] <= timings["draft_tokens"]
        else:
            assert "draft_tokens" not in timings
    accepted = metric(client, "headroom_draft_tokens_accepted_total")
    assert (accepted > 0) == (started_with == "ngram")
