"""What pages of other sites may not do."""

import socket
from typing import Any

import httpx
import pytest

from headroom.options import Options
from headroom.server.browsers import host_name
from tests.server.fakes import FakeLLM, serving

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
OLLAMA_BODY = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}]}'


def post(client: httpx.Client, headers: dict[str, str], path: str = CHAT) -> httpx.Response:
    body = OLLAMA_BODY if path.startswith("/api/") else BODY
    return client.post(path, content=body, headers=headers)


def code(response: httpx.Response) -> str:
    error: dict[str, Any] = response.json()["error"]
    return str(error["code"])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1234",
        "127.0.0.1",
        "127.0.0.1:99",
        "192.168.1.7:8080",
        "[::1]:8080",
        "[fe80::1%25eth0]:8080",
        "app.localhost",
        "host.docker.internal:8080",
        socket.gethostname(),
    ],
)
def test_the_servers_own_names_and_addresses_are_answered(shared: httpx.Client, host: str) -> None:
    assert shared.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example"])
def test_a_foreign_name_is_refused_unless_it_is_allowed(shared: httpx.Client, host: str) -> None:
    refused = shared.get("/v1/models", headers={"host": host})
    assert (refused.status_code, code(refused)) == (403, "host_not_allowed")
    assert f"--allow-host {host.partition(':')[0]}" in refused.json()["error"]["message"]
    for allowed in (f"other.example,{host_name(host)}", "*"):
        with serving(FakeLLM(), Options(port=0, allow_host=allowed)) as server:
            answer = httpx.get(server.address + "/v1/models", headers={"host": host})
            assert answer.status_code == 200


def test_a_foreign_origin_is_refused_and_the_servers_own_is_not(shared: httpx.Client) -> None:
    own = f"http://{shared.base_url.host}:{shared.base_url.port}"
    assert post(shared, {**JSON, "origin": own}).status_code == 200
    for origin in ("http://evil.example", "null", f"http://{shared.base_url.host}", own + "0"):
        refused = post(shared, {**JSON, "origin": origin})
        assert (refused.status_code, code(refused)) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://]", "[", "\xff", "://"])
def test_a_text_that_is_no_origin_is_refused_like_a_foreign_one(
    shared: httpx.Client, origin: str
) -> None:
    response = shared.get("/v1/models", headers={"Origin": origin.encode("latin-1")})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


def test_several_origins_may_be_allowed() -> None:
    options = Options(port=0, cors="http://a.example,https://b.example")
    with serving(FakeLLM(), options) as server, httpx.Client(base_url=server.address) as client:
        for origin in ("http://a.example", "https://b.example"):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            assert client.options(CHAT, headers=asked).status_code == 200
            answer = post(client, {**JSON, "origin": origin})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert post(client, {**JSON, "origin": "http://c.example"}).status_code == 403


def test_all_origins_of_a_scheme_may_be_allowed() -> None:
    options = Options(port=0, cors="vscode-webview://*,app://obsidian.md")
    allowed = ("vscode-webview://1a2b", "vscode-webview://3c4d", "app://obsidian.md")
    refused = ("app://other.md", "vscode-webview://", "http://vscode-webview", "null")
    with serving(FakeLLM(), options) as server, httpx.Client(base_url=server.address) as client:
        for origin in allowed:
            asked = {"origin": origin, "access-control-request-method": "POST"}
            assert client.options(CHAT, headers=asked).status_code == 200
            answer = post(client, {**JSON, "origin": origin})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
        for origin in refused:
            assert post(client, {**JSON, "origin": origin}).status_code == 403


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
def test_a_body_must_be_declared_as_json(shared: httpx.Client, kind: str, status: int) -> None:
    response = post(shared, {"content-type": kind})
    assert response.status_code == status
    if status != 200:
        assert code(response) == "unsupported_media_type"
        assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_curl_d_works_on_ollamas_paths_but_no_pages_form(shared: httpx.Client) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert post(shared, form, "/api/chat").status_code == 200
    own = f"http://{shared.base_url.host}:{shared.base_url.port}"
    refused = post(shared, {**form, "origin": own}, "/api/chat")
    assert refused.status_code == 415
    assert isinstance(refused.json()["error"], str)  # in Ollama's shape


def test_a_refusal_has_the_shape_of_the_api(shared: httpx.Client) -> None:
    refused = post(shared, {**JSON, "host": "evil.example"}, "/v1/messages")
    assert refused.json()["error"]["type"] == "permission_error"
