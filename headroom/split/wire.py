"""Wire: how an engine and its worker processes talk: JSON and raw tensors over one TCP connection.

Nothing that is received is executed: there are no pickles, and the type and the shape of every
tensor are checked before its bytes are read. Both ends prove that they know the shared token before
they send anything else. The connection is not encrypted.
"""

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from headroom.errors import DeviceError

MOST_HEADER_BYTES = 16 << 20
MOST_UNPROVEN_BYTES = 4096  # of a message from a peer that has not proved itself yet
MOST_TENSOR_BYTES = 4 << 30  # of all tensors of a message
# Shorter messages are sent at once: each further call of the system would take longer than a copy.
JOINED_BYTES = 64 << 10
BEAT_S = 1.0  # seconds between heartbeats
SECRET_BYTES = 32

_LENGTH = struct.Struct("<I")  # of the header that follows
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}

# Errors that parsing a malformed header can raise.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError)

Header = dict[str, Any]


class Message(NamedTuple):
    """A message: a JSON object, whose `type` says what it is, and tensors."""

    header: Header
    tensors: list[torch.Tensor]


class WireError(DeviceError):
    """A connection has ended, is silent for too long, or carries a malformed message."""


class SilenceError(WireError):
    """The other end has said nothing for too long; the connection itself has not ended."""


class RefusedError(DeviceError):
    """The engine does not take this worker, and would not if it asked again."""


class Connection:
    """One end of a connection; any thread may send, one thread receives."""

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._proved = False  # both ends know the token
        self.timeout_s = timeout_s  # of silence, after which `receive` raises SilenceError
        self.deadline: float | None = None  # time.monotonic() after which `receive` gives up
        end.settimeout(timeout_s)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_address(self) -> str:
        """The address of this end."""
        return str(self._end.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The address of the other end."""
        return str(self._end.getpeername()[0])

    def send(self, header: Header, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message; the tensors are in host memory."""
        parts = [tensor.detach().contiguous() for tensor in tensors]
        listed = [[str(part.dtype).removeprefix("torch."), list(part.shape)] for part in parts]
        text = json.dumps(header | ({"tensors": listed} if parts else {})).encode()
        pieces: list[bytes | memoryview] = [_LENGTH.pack(len(text)), text]
        pieces += [_bytes_of(part) for part in parts if part.numel()]
        if sum(map(len, pieces)) <= JOINED_BYTES:
            pieces = [b"".join(pieces)]
        try:
            with self._sending:
                for piece in pieces:
                    self._end.sendall(piece)
        except OSError as error:
            raise WireError(f"The connection has ended: {error}.") from error

    def receive(self) -> Message:
        """Wait for the next message."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        most = MOST_HEADER_BYTES if self._proved else MOST_UNPROVEN_BYTES
        if length > most:
            raise WireError(f"A message of {length} bytes was announced; at most {most} may come.")
        try:
            header = json.loads(bytes(self._read(length)))
            listed = header.pop("tensors", [])
            assert isinstance(header["type"], str)
            shapes = [(_TYPES[name], [int(size) for size in shape]) for name, shape in listed]
        except _MALFORMED as error:
            raise WireError("A malformed message came.") from error
        sizes = [kind.itemsize * math.prod(shape) for kind, shape in shapes]
        most = MOST_TENSOR_BYTES if self._proved else 0
        if any(size < 0 for _, shape in shapes for size in shape) or sum(sizes) > most:
            raise WireError(
                f"Tensors of the shapes {[shape for _, shape in shapes]} were announced."
            )
        return Message(header, [self._read_tensor(kind, shape) for kind, shape in shapes])

    def close(self) -> None:
        """End the connection; a thread that receives gets a WireError."""
        with contextlib.suppress(OSError):  # the other end may have been faster
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def end_sending(self) -> None:
        """Send no more; the other end reads what was sent, and may still send."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def refuse(self, reason: str) -> None:
        """Tell a worker why it is not taken, and raise the reason."""
        self.send({"type": "refused", "reason": reason})
        raise RefusedError(reason)

    def prove_as_engine(self, token: str) -> None:
        """Let a worker prove that it knows the token, and prove the same to it."""
        challenge = secrets.token_hex(SECRET_BYTES)
        self.send({"type": "challenge", "challenge": challenge})
        answer = self.receive().header
        theirs = str(answer.get("challenge"))
        if not _is_proof(answer, token, "worker", challenge, theirs):
            self.refuse(f"The worker at {self.peer_address} has another token than the engine.")
        self.send({"type": "proof", "proof": _proof(token, "engine", challenge, theirs)})
        self._proved = True

    def prove_as_worker(self, token: str) -> None:
        """Prove to the engine that this worker knows the token, and let it prove the same."""
        theirs = str(self.receive().header.get("challenge"))
        challenge = secrets.token_hex(SECRET_BYTES)
        proof = _proof(token, "worker", theirs, challenge)
        self.send({"type": "answer", "challenge": challenge, "proof": proof})
        answer = self.receive().header
        if answer["type"] == "refused" or not _is_proof(answer, token, "engine", theirs, challenge):
            raise RefusedError(
                f"The engine at {self.peer_address} has another token than this worker.",
                hint="Give the engine and its workers the same HEADROOM_WORKER_TOKEN.",
            )
        self._proved = True

    def _read(self, size: int) -> memoryview:
        buffer = memoryview(bytearray(size))
        self._read_into(buffer)
        return buffer

    def _read_tensor(self, kind: torch.dtype, shape: list[int]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=kind)
        if tensor.numel():
            self._read_into(_bytes_of(tensor))
        return tensor

    def _read_into(self, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                if self.deadline is not None and time.monotonic() > self.deadline:
                    raise TimeoutError
                count = self._end.recv_into(buffer[done:])
                if not count:
                    raise WireError("The connection has ended.")
                done += count
        except TimeoutError as error:
            told = f"It has said nothing for {self.timeout_s:g} seconds."
            raise SilenceError(told) from error
        except OSError as error:
            raise WireError(f"The connection has ended: {error}.") from error


class Heartbeat:
    """Sends a message every second, so that the other end notices if this process hangs.

    `progress` counts what the main thread has done: the count stands still if that thread hangs.
    """

    def __init__(self, connection: Connection, progress: Callable[[], int] = lambda: 0) -> None:
        self._connection, self._progress = connection, progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="headroom-heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send no more."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._connection.send({"type": "alive", "progress": self._progress()})
            except WireError:
                return  # the thread that receives reports the reason


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _proof(token: str, who: str, engine: str, worker: str) -> str:
    """Return the HMAC of both ends' challenges, which shows that `who` knows the token."""
    words = f"headroom {who} {engine} {worker}".encode()
    return hmac.new(token.encode(), words, hashlib.sha256).hexdigest()


def _is_proof(answer: Header, token: str, who: str, engine: str, worker: str) -> bool:
    given = answer.get("proof")
    known = isinstance(given, str) and given.isascii()
    return known and hmac.compare_digest(str(given), _proof(token, who, engine, worker))
