"""RequestHold: signs of life during a load, errors at the end of a stream, leases that end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from headroom.server.holding import (
    EVENTS,
    HoldModels,
    RequestHold,
    WaitingStream,
    current_hold,
)
from headroom.server.shelf import Lease

LINES = WaitingStream("application/x-ndjson", lambda: b"\n", b"", b"\n")


class NotedLease:
    """A lease that notes its release."""

    def __init__(self, shelved: object = None, llm: object = None) -> None:
        self.shelved, self.llm = shelved, llm
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Client:
    """What an HTTP client receives."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        self.messages.append(dict(message))

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == "http.response.start"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def start(status: int, kind: str) -> dict[str, Any]:
    headers = [(b"content-type", kind.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(text: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


async def loaded_late(client: Client) -> Any:
    """Load a model until the client has got a sign of life."""
    while not client.body:
        await asyncio.sleep(0.001)
    return NotedLease()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_a_quick_load_sends_nothing_and_the_response_goes_through() -> None:
    async def ask() -> None:
        assert await hold.wait(asyncio.sleep(0, lease), EVENTS, 60) is lease
        await hold.send(start(404, "application/json"))
        await hold.send(body(b"{}"))

    client, lease = Client(), cast(Lease, NotedLease())
    hold = RequestHold(client.send)
    run(ask())
    assert client.messages == [start(404, "application/json"), body(b"{}")]


@pytest.mark.parametrize("stream", [EVENTS, LINES])
def test_a_long_load_begins_the_stream_that_the_response_then_continues(
    stream: WaitingStream,
) -> None:
    async def ask() -> None:
        await hold.wait(loaded_late(client), stream, 0.01)
        await hold.send(start(200, f"{stream.media_type}; charset=utf-8"))
        await hold.send(body(b"data: 1\n\n", more=True))
        await hold.send(body(b""))

    client = Client()
    hold = RequestHold(client.send)
    run(ask())
    (begun,) = client.starts
    assert begun["status"] == 200
    assert dict(begun["headers"])[b"content-type"].decode() == stream.media_type
    assert client.body.startswith(stream.keep_alive())
    assert client.body.endswith(stream.keep_alive() + b"data: 1\n\n")
    assert client.messages[-1] == body(b"")


@pytest.mark.parametrize(
    ("stream", "last"),
    [(EVENTS, b'event: error\ndata: {"error":1}\n\n'), (LINES, b'{"error":1}\n')],
)
def test_an_error_after_a_begun_stream_is_its_last_part(stream: WaitingStream, last: bytes) -> None:
    async def ask() -> None:
        await hold.wait(loaded_late(client), stream, 0.01)
        await hold.send(start(503, "application/json"))
        await hold.send(body(b'{"error"', more=True))
        await hold.send(body(b":1}"))

    client = Client()
    hold = RequestHold(client.send)
    run(ask())
    assert len(client.starts) == 1
    assert client.body.endswith(stream.keep_alive() + last)
    assert not client.messages[-1]["more_body"]


def test_a_load_that_fails_raises_its_error_and_one_that_nobody_waits_for_is_cancelled() -> None:
    ended: list[str] = []

    async def fail() -> Any:
        raise ValueError("broken")

    async def forever() -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def ask() -> None:
        hold = RequestHold(Client().send)
        with pytest.raises(ValueError, match="broken"):
            await hold.wait(fail(), EVENTS, 1.0)
        waiting = asyncio.create_task(hold.wait(forever(), EVENTS, 60))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.01)

    run(ask())
    assert ended == ["cancelled"]


def test_a_request_holds_each_model_until_it_ends() -> None:
    leases = [NotedLease(shelved="a", llm="A"), NotedLease(shelved="b", llm="B")]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        hold = current_hold()
        assert hold is not None
        for lease in leases:
            hold.add(lease)  # type: ignore[arg-type]
        seen.extend(hold.llm_of(name) for name in ("b", "a", "c"))  # type: ignore[arg-type]
        assert [lease.released for lease in leases] == [0, 0]
        raise RuntimeError("the endpoint failed")

    async def ask() -> None:
        with pytest.raises(RuntimeError, match="the endpoint failed"):
            await HoldModels(app)({"type": "http"}, None, Client().send)  # type: ignore[arg-type]
        assert current_hold() is None

    run(ask())
    assert seen == ["B", "A", None]
    assert [lease.released for lease in leases] == [1, 1]


def test_what_is_no_http_request_holds_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert current_hold() is None

    run(HoldModels(app)({"type": "lifespan"}, None, Client().send))  # type: ignore[arg-type]
