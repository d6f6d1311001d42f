"""Errors have Anthropic's format on its paths, and on no others."""

from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from headroom.errors import CapacityError, HeadroomError, ModelError, RequestError
from headroom.options import Options
from headroom.server.anthropic_errors import error_body, error_status
from headroom.server.refusals import RefusalError, problem_of
from tests.server.fakes import FakeLLM, serving

HI = {"role": "user", "content": "hi"}
BODY = {"max_tokens": 9, "messages": [HI]}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", "/v1/models/none", VERSION, 404, "not_found_error"),
    ],
)
def test_errors_of_paths_have_anthropic_s_shape(
    shared: httpx.Client, method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    response = shared.request(method, path, headers=headers)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("path", ["/v1/models/none", "/v1/messagesx", "/v1/chat/completions"])
def test_errors_of_other_paths_have_openai_s_shape(shared: httpx.Client, path: str) -> None:
    assert set(shared.get(path).json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_no_json_is_refused(shared: httpx.Client) -> None:
    response = shared.post("/v1/messages", content=b"{")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("The body is not JSON")


def refusal(options: Options, llm: FakeLLM, **fields: Any) -> anthropic.APIStatusError:
    """Return what the official client raises, which sends its key as x-api-key."""
    request: Any = {"model": "m", "max_tokens": 9, "messages": [HI], **fields}
    with (
        serving(llm, options) as server,
        Anthropic(base_url=server.address, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError) as refused,
    ):
        client.messages.create(**request)
    return refused.value


def kind_of(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    return str(body["error"]["type"])


def test_a_wrong_key_is_an_authentication_error() -> None:
    error = refusal(Options(port=0, api_key="right"), FakeLLM())
    assert isinstance(error, anthropic.AuthenticationError)
    assert kind_of(error) == "authentication_error"
    assert "x-api-key: KEY" in error.message


def test_a_long_body_is_too_large() -> None:
    error = refusal(Options(port=0, max_body=1024), FakeLLM(), system="x" * 2000)
    assert (error.status_code, kind_of(error)) == (413, "request_too_large")


def test_an_unknown_model_is_not_found_where_names_are_strict() -> None:
    error = refusal(Options(port=0, strict_model=True), FakeLLM())
    assert isinstance(error, anthropic.NotFoundError)
    assert kind_of(error) == "not_found_error"


def test_a_full_queue_is_an_overload_that_says_when_to_retry() -> None:
    llm = FakeLLM()
    llm.engine.takes = 0
    error = refusal(Options(port=0), llm)
    assert (error.status_code, kind_of(error)) == (529, "overloaded_error")
    assert error.response.headers["retry-after"] == "1"


def test_a_tool_runner_goes_on_without_the_thread_that_this_server_does_not_keep() -> None:
    llm = FakeLLM()
    with (
        serving(llm, Options(port=0)) as server,
        Anthropic(base_url=server.address, api_key="none", max_retries=0) as client,
    ):
        body = {**BODY, "thread": {"type": "create"}}
        refused = httpx.post(f"{server.address}/v1/messages", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["details"]["error_code"] == "thread_unsupported_request"

        @anthropic.beta_tool
        def get_weather(city: str) -> str:
            """Return the forecast of a city."""
            llm.engine.words = f"In {city}: grey."
            return "grey"

        call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
        llm.engine.words = f"<tool_call>\n{call}\n</tool_call>"
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=200,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[get_weather],
        )
        (block,) = runner.until_done().content
    assert block.type == "text"
    assert block.text == "In Paris: grey."
    assert [turn["role"] for turn in llm.conversations[-1]] == ["user", "assistant", "tool"]
    assert llm.conversations[-1][-1]["content"] == "grey"


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
def test_the_key_may_come_in_either_header(header: str) -> None:
    value = "right" if header == "x-api-key" else "Bearer right"
    with (
        serving(FakeLLM(), Options(port=0, api_key="right")) as server,
        httpx.Client(base_url=server.address) as client,
    ):
        answer = client.post("/v1/messages", json=BODY, headers={header: value})
        assert answer.status_code == 200
        wrong = client.post("/v1/messages", json=BODY, headers={header: value + "x"})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["type"] == "authentication_error"


def test_a_refused_thread_makes_the_official_client_send_the_whole_history(
    shared: httpx.Client,
) -> None:
    client = Anthropic(base_url=str(shared.base_url), api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="fake", max_tokens=99, messages=[{"role": "user", "content": "hi"}], tools=[]
    )
    (block,) = runner.until_done().content
    assert block.type == "text"
    assert block.text == "Hello, world."
    threads = client.beta.messages.thread(model="fake", max_tokens=99)
    with pytest.raises(anthropic.BadRequestError, match="This server keeps no conversations"):
        threads.send({"role": "user", "content": "hi"})


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("Wrong.", param="top_p"), 400, "invalid_request_error"),
        (ModelError("No template."), 400, "invalid_request_error"),
        (RefusalError(408, "request_timeout", "Slow."), 408, "timeout_error"),
        (RefusalError(429, "busy", "Later."), 429, "rate_limit_error"),
        (RefusalError(500, "generation_failed", "No."), 500, "api_error"),
        (RefusalError(503, "shutting_down", "Later."), 503, "overloaded_error"),
        (CapacityError("Full."), 529, "overloaded_error"),
    ],
)
def test_every_error_has_its_type(error: HeadroomError, status: int, kind: str) -> None:
    problem = problem_of(error)
    body = error_body(problem, error, "req_1")
    assert error_status(problem, error) == status
    assert body["error"] == {"type": kind, "message": error.message}
    assert body["request_id"] == "req_1"
