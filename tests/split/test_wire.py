"""The connection between an engine and a worker: what passes, and what is refused."""

import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import DeviceError
from headroom.split import wire
from headroom.split.wire import Connection, Heartbeat, WireError

TOKEN = "a long random text"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def pair(ends: tuple[socket.socket, socket.socket]) -> tuple[Connection, Connection]:
    return Connection(ends[0], 5.0), Connection(ends[1], 5.0)


def together(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Run some calls at the same time; return the error of each, if it raised one."""
    errors: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except DeviceError as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return errors


def proved(pair: tuple[Connection, Connection]) -> tuple[Connection, Connection]:
    engine, worker = pair
    both = together(lambda: engine.prove_as_engine(TOKEN), lambda: worker.prove_as_worker(TOKEN))
    assert both == [None, None]
    return pair


KINDS = {
    torch.float32: torch.tensor([1.5, float("nan"), -0.0, float("inf")]),
    torch.float16: torch.tensor([1.5, -0.0], dtype=torch.float16),
    torch.bfloat16: torch.tensor([1.5, 3e38], dtype=torch.bfloat16),
    torch.int64: torch.tensor([2**62, -1]),
    torch.bool: torch.tensor([True, False, True]),
}


def test_tensors_of_every_type_and_shape_arrive_bit_by_bit(
    pair: tuple[Connection, Connection],
) -> None:
    engine, worker = proved(pair)
    sent = [*KINDS.values(), torch.zeros(0, 3), torch.arange(24.0).view(2, 3, 4), torch.tensor(7)]
    sent.append(torch.arange(12.0).view(3, 4).t())  # rows that are not side by side
    engine.send({"type": "step", "n": 3}, sent)
    found = worker.receive()
    assert found.header == {"type": "step", "n": 3}
    for a, b in zip(sent, found.tensors, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.booleans())))
def test_any_json_object_arrives(header: dict[str, object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    header = {**header, "type": "x"}
    header.pop("tensors", None)
    with here, there:
        Connection(here, 5.0).send(header)
        receiver = Connection(there, 5.0)
        receiver._proved = True
        assert receiver.receive().header == header


def test_only_who_knows_the_token_is_taken(pair: tuple[Connection, Connection]) -> None:
    engine, worker = pair
    errors = together(
        lambda: engine.prove_as_engine(TOKEN), lambda: worker.prove_as_worker("another text")
    )
    assert "has another token than the engine" in str(errors[0])
    assert "has another token" in str(errors[1])
    assert "HEADROOM_WORKER_TOKEN" in str(errors[1])


def test_an_engine_that_does_not_know_the_token_is_not_obeyed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    worker = Connection(ends[1], 5.0)

    def pretend() -> None:
        engine = Connection(ends[0], 5.0)
        engine.send({"type": "challenge", "challenge": "00" * 32})
        answer = engine.receive().header
        engine.send({"type": "proof", "proof": answer["proof"]})  # what the worker itself has said

    errors = together(pretend, lambda: worker.prove_as_worker(TOKEN))
    assert "has another token" in str(errors[1])


def test_before_the_proof_only_little_is_read(pair: tuple[Connection, Connection]) -> None:
    engine, worker = pair
    worker.send({"type": "answer", "challenge": "x" * 5000})
    with pytest.raises(WireError, match="at most 4096 may come"):
        engine.receive()


@pytest.mark.parametrize(
    "text",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"type": 3}',
        b'{"type": "x", "tensors": [["object", [1]]]}',
        b'{"type": "x", "tensors": [["float32", ["a"]]]}',
        b'{"type": "x", "tensors": 5}',
        b"\xff\xfe",
        b"[" * 4000,
    ],
)
def test_what_no_peer_of_ours_sends_is_refused(
    ends: tuple[socket.socket, socket.socket], text: bytes
) -> None:
    ends[0].sendall(struct.pack("<I", len(text)) + text)
    with pytest.raises(WireError, match="A malformed message came"):
        Connection(ends[1], 5.0).receive()


@pytest.mark.parametrize("shape", [[-1], [2**20, 2**20], [-(2**40), -(2**40)]])
def test_tensors_of_impossible_sizes_are_refused_before_memory_is_taken(
    ends: tuple[socket.socket, socket.socket], shape: list[int]
) -> None:
    text = json.dumps({"type": "x", "tensors": [["float32", shape]]}).encode()
    ends[0].sendall(struct.pack("<I", len(text)) + text)
    receiver = Connection(ends[1], 5.0)
    receiver._proved = True
    with pytest.raises(WireError, match="Tensors of the shapes"):
        receiver.receive()


def test_a_stranger_can_send_no_tensors(ends: tuple[socket.socket, socket.socket]) -> None:
    Connection(ends[0], 5.0).send({"type": "x"}, [torch.ones(3)])
    with pytest.raises(WireError, match=r"Tensors of the shapes \[\[3\]\] were announced"):
        Connection(ends[1], 5.0).receive()


def test_silence_and_a_closed_end_are_told_apart(pair: tuple[Connection, Connection]) -> None:
    engine, worker = proved(pair)
    engine._end.settimeout(0.1)
    engine.timeout_s = 0.1
    with pytest.raises(WireError, match=r"said nothing for 0\.1 seconds"):
        engine.receive()
    worker.close()
    with pytest.raises(WireError, match="has ended"):
        engine.receive()


def test_a_message_to_an_end_that_is_closed_is_an_error(
    pair: tuple[Connection, Connection],
) -> None:
    engine, worker = proved(pair)
    worker.close()

    def send_often() -> None:  # the system may take the first messages
        for _ in range(10):
            engine.send({"type": "x"}, [torch.zeros(1 << 16)])

    with pytest.raises(WireError, match="has ended"):
        send_often()


def test_a_heartbeat_goes_on_until_it_is_ended(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.01)
    engine, worker = proved(pair)
    counter = itertools.count()
    heartbeat = Heartbeat(worker, lambda: next(counter))
    told = [engine.receive().header for _ in range(3)]
    assert told == [{"type": "alive", "progress": count} for count in range(3)]
    heartbeat.end()
    heartbeat._thread.join(5)
    assert not heartbeat._thread.is_alive()
