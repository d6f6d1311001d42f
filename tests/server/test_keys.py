"""API keys: where they come from, and their limits."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import OptionError
from headroom.options import Options
from headroom.server.keys import Allowance, ApiKey, KeyRing
from headroom.server.refusals import RefusalError
from tests.server.fakes import FakeLLM, serving

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def write_keys(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused_at_the_start(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(OptionError, match="--api-key is empty, so that anybody could use"),
        serving(FakeLLM(), Options(port=0, api_key=key)),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("[alice]\n", "alice has no `key`"),
        ("alice = 'k'\n", "alice has no `key`"),
        ("[alice]\nkey = ''\n", "the key of alice is empty"),
        ("[alice]\nkey = 'k '\n", "the key of alice begins or ends with a blank"),
        ("[alice]\nkey = 'k'\n[bob]\nkey = 'k'\n", "has the same key twice"),
        ("[alice]\nkey = 'k'\nrequests = 3\n", "alice has the unknown setting 'requests'"),
        ("[alice]\nkey = 'k'\ntokens_per_minute = 0\n", "tokens_per_minute of alice is 0"),
        (
            "[alice]\nkey = 'k'\nrequests_per_minute = true\n",
            "requests_per_minute of alice is True",
        ),
        ("[alice\n", "is not a TOML file"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        KeyRing(Options(api_keys=write_keys(tmp_path, text)))
    with pytest.raises(OptionError, match="Cannot read the file of keys"):
        KeyRing(Options(api_keys=str(tmp_path / "missing.toml")))


def test_each_key_of_the_file_lets_its_client_in(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[alice]\nkey = 'a'\n[bob]\nkey = 'b'\nrequests_per_minute = 2\n")
    options = Options(port=0, api_key="main", api_keys=keys)
    with serving(FakeLLM(), options) as server, httpx.Client(base_url=server.address) as client:

        def ask(key: str) -> httpx.Response:
            return client.post(CHAT, json=BODY, headers={"x-api-key": key})

        assert [ask(key).status_code for key in ("main", "a", "a", "a", "b", "b")] == [200] * 6
        assert ask("c").status_code == 401
        limited = ask("b")
        assert limited.status_code == 429
        assert 1 <= int(limited.headers["retry-after"]) <= 30
        assert limited.json()["error"] == {
            "message": "The key 'bob' has used up its requests of this minute. "
            f"Try again in {limited.headers['retry-after']} s.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert ask("a").status_code == 200


def test_tokens_are_counted_when_a_request_has_ended(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[alice]\nkey = 'a'\ntokens_per_minute = 10\n")
    with serving(FakeLLM(), Options(port=0, api_keys=keys)) as server:
        headers = {"authorization": "Bearer a"}
        first = httpx.post(server.address + CHAT, json=BODY, headers=headers)
        assert first.status_code == 200  # its tokens are not known before
        second = httpx.post(server.address + "/v1/messages", json=BODY, headers=headers)
        assert second.status_code == 429
        assert second.json()["error"]["type"] == "rate_limit_error"  # in Anthropic's shape


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 120), st.integers(0, 300)), max_size=20),
)
def test_an_allowance_never_lets_more_through_than_its_rate(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    now = [0.0]
    allowance = Allowance(per_minute, lambda: now[0])
    spent = 0
    for pause_s, amount in steps:
        now[0] += pause_s
        if allowance.wait_s() == 0:
            # What was spent before is covered by the start and by the time that has passed.
            assert spent <= per_minute * (1 + now[0] / 60) - 1 + 1e-6
            allowance.spend(amount)
            spent += amount


def test_after_the_time_that_a_refusal_names_the_key_works_again() -> None:
    now = [0.0]
    key = ApiKey("alice", "a", requests_per_minute=6, clock=lambda: now[0])
    for _ in range(6):
        key.take_request()
    with pytest.raises(RefusalError) as caught:
        key.take_request()
    assert caught.value.retry_after_s == 10
    now[0] = 9.9
    with pytest.raises(RefusalError):
        key.take_request()
    now[0] = 10.0
    key.take_request()
