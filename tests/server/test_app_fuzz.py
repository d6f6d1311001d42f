"""Thousands of wrong and half-right requests: the server answers each with a status below 500."""

import copy
import errno
import gc
import json
import logging
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headroom.llm import LLM
from headroom.options import Options
from headroom.server.http_server import HttpServer
from tests.server.fakes import serving
from tests.synth_models import write_model

log = logging.getLogger(__name__)  # figures: --log-cli-level info

CLIENTS = 4
# From the 5,000th request on. Until then caches fill, and the first panic of the grammar compiler
# loads 50 MiB of debug information for its backtrace.
MOST_GROWN_MIB = 20

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CALLED = [
    *MESSAGES,
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "nothing"},
]
# A right body for every endpoint that takes one.
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": CALLED,
            "max_tokens": 3,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "n": 2,
            "logprobs": True,
            "top_logprobs": 3,
            "stop": ["x"],
            "logit_bias": {"5": 1},
            "seed": 3,
            "reasoning_effort": "low",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 2, "suffix": None},
    ),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 2, "temperature": 0.5, "top_k": 4}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 8, "encoding_format": "base64"}),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "instructions": "Be brief.",
            "max_output_tokens": 16,
            "stream": True,
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/responses/resp_1/cancel", {}),
    (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 3,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"name": "look", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES[1:]}),
    (
        "/api/chat",
        {
            "model": "m",
            "messages": MESSAGES,
            "options": {"num_predict": 3, "temperature": 0},
            "format": SCHEMA,
            "think": True,
            "keep_alive": "5m",
        },
    ),
    ("/api/generate", {"model": "m", "prompt": "hi", "options": {"num_predict": 3}, "raw": True}),
    ("/api/embed", {"model": "m", "input": ["a"]}),
    ("/api/embeddings", {"model": "m", "prompt": "a"}),
    ("/api/show", {"model": "m"}),
    ("/api/pull", {"model": "m"}),
    ("/tokenize", {"content": "hi", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
GETS = [
    "/page/app.js",
    "/page/..%2f..%2fapp.py",
    "/page/%00",
    "/health",
    "/metrics",
    "/props",
    "/plan",
    "/experts",
    "/v1/models",
    "/v1/models/m",
    "/v1/models/%ff/%00",
    "/v1/models/" + "a" * 5000,
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/input_items",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/",
    "/nowhere",
]
QUERIES = [
    "",
    *(
        "model=m",
        "model=%00%ff",
        "stream=true&starting_after=-1",
        "starting_after=1e400",
        "x=[&&=%",
    ),
    *("limit=0&order=up&after=x", "limit=99999999999999999999", "client_version=", "include[]=x"),
]
HEADERS = [
    *(("origin", text) for text in ("http://[", "null", "http://evil.example", "//", "http://:x")),
    *(("host", text) for text in ("[", "evil.example", "127.0.0.1:99999999", "a" * 300, "[::1]")),
    *(("authorization", text) for text in ("Bearer", "Bearer \xff", "Basic YTpi", "Bearer a b")),
    *(("content-type", text) for text in ("text/plain", "", "application/json; charset=\xff")),
    ("content-encoding", "gzip"),
    ("accept", "text/event-stream;q=x, \xff"),
    ("x-request-id", "odd\ttext"),
    ("x-api-key", "\xff" * 100),
    ("anthropic-version", "\xff"),
    ("if-none-match", ",\xff,W/"),
    *(("x-forwarded-for", text) for text in ("", ",", "a" * 1000, "1.2.3.4:x, [::")),
    ("x-forwarded-proto", "wss, ,"),
]
MOST_ECHOED = 4000  # characters of a refusal: it may not repeat all that the client sent
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e-310, 1e308, 2**31, 2**63, 2**64, -(2**63)),
    *("", " ", "x", "a" * 5000, "\0", "\u202e\ufeff", "🙂" * 40, "<think>", "<|im_end|>", "auto"),
    *([], {}, [None], [[]], {"": None}, {"type": "x"}, {"type": "object"}, [1, "a", None]),
    *({"k" * 5000: 1}, {"type": "object", "properties": {"k" * 5000: {"type": "x"}}}),
    *("json_schema", "grammar", "data:image/png;base64,AA==", "../../etc/passwd", "{{ 7 * 7 }}"),
    {"$ref": "#"},
    {"type": "string", "pattern": "(a+)+$"},
    {"anyOf": [{"type": "integer"}, {"$ref": "#/anyOf/0"}]},
    {"type": "object", "additionalProperties": {"$ref": "#"}},
]


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from paths_in(inner, (*path, key))


def changed(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a body with one to three changes: values replaced, removed, repeated or nested."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        where = list(paths_in(body))
        if not where:
            break
        *outer, key = draw.choice(where)
        place: Any = body
        for step in outer:
            place = place[step]
        way = draw.randrange(5)
        if way == 0:
            del place[key]
        elif way == 1:
            place[key] = [place[key]] * draw.choice((1, 2, 50))
        elif way == 2 and isinstance(place, dict):
            other = draw.choice(BODIES)[1]
            name = draw.choice(list(other) or ["x"])
            place[name] = copy.deepcopy(other.get(name))
        else:
            place[key] = copy.deepcopy(draw.choice(ODD))
    return body


def make_request(draw: random.Random) -> dict[str, Any]:
    """Return the arguments of `httpx.Client.request` for one wrong or half-right request."""
    headers: dict[str, str | bytes] = {"content-type": "application/json"}
    if draw.random() < 0.05:
        name, value = draw.choice(HEADERS)
        return {
            "method": draw.choice(("GET", "HEAD", "OPTIONS", "DELETE")),
            "url": f"{draw.choice(GETS)}?{draw.choice(QUERIES)}",
            "headers": {name: value.encode("latin-1")} if draw.random() < 0.5 else {},
        }
    path, body = draw.choice(BODIES)
    content = json.dumps(changed(body, draw) if draw.random() < 0.95 else body).encode()
    noise = draw.random()
    if noise < 0.05:
        content = content[: draw.randrange(len(content) + 1)]
    elif noise < 0.08:
        spot = draw.randrange(len(content) + 1)
        content = content[:spot] + draw.randbytes(draw.randint(1, 8)) + content[spot:]
    elif noise < 0.12:
        name, value = draw.choice(HEADERS)
        headers[name] = value.encode("latin-1")
    method = "POST" if draw.random() < 0.98 else draw.choice(("PUT", "DELETE", "PATCH"))
    return {"method": method, "url": path, "content": content, "headers": headers}


PIECES = [
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n"),
    *(b"\r\n", b"\n", b"\0", b" ", b":", b"\xff", b"A" * 70_000, b"X: y\r\n" * 300),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 9999999999999\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, x\r\n", b"ffffffffffff\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"0\r\n\r\n"),
]


def make_bytes(draw: random.Random) -> bytes:
    """Return bytes that resemble a request: pieces put in, parts cut out, requests in a row."""
    path, body = draw.choice(BODIES)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    data *= draw.choice((1, 1, 3))
    for _ in range(draw.randint(1, 3)):
        spot = draw.randrange(len(head) + 40)
        cut = draw.choice((0, 0, 1, 30))
        data = data[:spot] + draw.choice(PIECES) + data[spot + cut :]
    return data[: draw.randrange(len(data))] if draw.random() < 0.2 else data


def send_bytes(server: HttpServer, data: bytes) -> bytes:
    """Send bytes and then nothing more; return all that the server sends until it closes."""
    with socket.create_connection(
        ("127.0.0.1", int(server.address.rpartition(":")[2])), timeout=60
    ) as connection:
        received = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                received += piece
        except OSError as error:  # the server may hang up before it has read all
            if error.errno not in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE):
                raise
    return received


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    path = write_model("qwen3", "q8_0", tmp_path_factory.mktemp("fuzz"), few_layers=True)
    options = Options(port=0, context=512, parallel=4, device="cpu", threads=1)
    with LLM(options=options, path=path) as llm, serving(llm, options) as running:
        yield running


def resident_mib() -> int:
    """Return the memory of this process, which runs the server, too."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4 // 1024


def fuzz(server: HttpServer, seed: int, count: int) -> Counter[int]:
    """Send requests from several clients; return how many answers had each status."""
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def ask(numbers: range) -> None:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            for number in numbers:
                request = make_request(random.Random(f"{seed} {number}"))
                response = client.request(**request)
                assert response.status_code < 500, (seed, number, request, response.text[:500])
                if response.status_code >= 400:
                    assert len(response.text) < MOST_ECHOED, (seed, number, request)
                if "event-stream" in response.headers.get("content-type", ""):
                    assert "internal_error" not in response.text, (seed, number, request)
                    assert "generation_failed" not in response.text, (seed, number, request)
                with lock:
                    statuses[response.status_code] += 1

    with ThreadPoolExecutor(CLIENTS) as clients:
        shares = [range(first, count, CLIENTS) for first in range(CLIENTS)]
        for done in [clients.submit(ask, share) for share in shares]:
            done.result()
    return statuses


def check_that_it_still_works(server: HttpServer) -> None:
    body = {"prompt": "The answer", "max_tokens": 4, "temperature": 0}
    texts = {
        httpx.post(server.address + "/v1/completions", json=body).json()["choices"][0]["text"]
        for _ in range(2)
    }
    assert len(texts) == 1
    stats = server.service.shelf.models[0].llm
    assert stats is not None
    assert stats.engine.stats().requests_running == 0
    assert stats.engine.stats().cache_pages_used == 0


def test_wrong_requests_are_refused_and_nothing_is_left_behind(server: HttpServer) -> None:
    statuses = fuzz(server, seed=1, count=300)
    assert statuses[200] > 20, "some requests are right"
    assert statuses[400] > 100, "most are wrong"
    check_that_it_still_works(server)


def test_bytes_that_are_hardly_http_are_refused_or_the_connection_is_closed(
    server: HttpServer,
) -> None:
    statuses: Counter[bytes] = Counter()
    for number in range(200):
        data = make_bytes(random.Random(f"bytes {number}"))
        received = send_bytes(server, data)
        found = re.findall(rb"^HTTP/1.1 (\d+)", received, re.MULTILINE)
        assert all(status < b"500" for status in found), (number, data[:500], received[:500])
        statuses.update(found)
    assert statuses[b"400"] > 50, statuses
    check_that_it_still_works(server)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_wrong_requests_leave_memory_flat(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("headroom", "httpx"):
        caplog.set_level(logging.WARNING, name)  # pytest would keep each line of the log
    statuses: Counter[int] = Counter()
    memory_mib = []
    for seed in range(2, 12):
        statuses += fuzz(server, seed=seed, count=1000)
        memory_mib.append(resident_mib())
    assert statuses.total() == 10_000
    log.info("answers by status: %s; memory after each 1,000: %s MiB", dict(statuses), memory_mib)
    assert memory_mib[-1] - memory_mib[len(memory_mib) // 2 - 1] < MOST_GROWN_MIB
    check_that_it_still_works(server)
