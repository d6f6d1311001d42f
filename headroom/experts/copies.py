"""Copies between host and GPU memory that run while the GPU computes, and waits for them.

A `CopyQueue` runs copies in order while the device computes. A `StagingRing` lets copies fill
buffers that the computing reads in turn. A `WaitClock` measures how long the computing waited, a
`CopyClock` how long copies took.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar, cast

import torch

from headroom.kernels.cuda.buffers import aligned
from headroom.kernels.cuda.driver import copy_async


class Mark(Protocol):
    """A point in a queue of work, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the point is reached."""

    def synchronize(self) -> None:
        """Wait until the point is reached."""


class CopyQueue(Protocol):
    """Runs copies while a device computes, in the order in which they were enqueued."""

    def mark(self) -> Mark:
        """Return a mark behind all computing that was enqueued so far."""

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy the sources to `out` one after another, once `after` is reached; return the end."""

    def wait(self, mark: Mark) -> None:
        """Make the computing that is enqueued from now on wait for `mark`."""


class CudaCopies:
    """Copies to and from a GPU on a separate stream; host memory should be pinned."""

    def __init__(
        self,
        device: torch.device,
        timed: Callable[[int, float], None] | None = None,  # told bytes and seconds of each copy
    ) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._clock = None if timed is None else CopyClock(timed)

    def mark(self) -> Mark:
        """Return a mark behind all computing that was enqueued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy the sources to `out` one after another, once `after` is reached; return the end."""
        # Calls the driver, because switching torch's stream and back takes several times as long.
        # Torch therefore does not keep the memory until the copy ends: the caller must.
        assert out.is_contiguous()
        assert sum(source.nbytes for source in sources) <= out.nbytes
        self._stream.wait_event(cast(torch.cuda.Event, after))
        to, stream, device = out.data_ptr(), self._stream.cuda_stream, self._device.index or 0
        begin = None if self._clock is None else self._clock.begin(self._stream)
        for source in sources:
            assert source.is_contiguous()
            copy_async(to, source.data_ptr(), source.nbytes, stream, device)
            to += source.nbytes
        if self._clock is not None and begin is not None:
            self._clock.end(begin, self._stream, sum(source.nbytes for source in sources))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done

    def wait(self, mark: Mark) -> None:
        """Make the computing that is enqueued from now on wait for `mark`."""
        torch.cuda.current_stream(self._device).wait_event(cast(torch.cuda.Event, mark))


class HostCopies:
    """Copies within host memory, done at once."""

    def mark(self) -> Mark:
        """Return a mark behind all computing that was enqueued so far."""
        return _Reached()

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy the sources to `out` one after another, once `after` is reached; return the end."""
        after.synchronize()
        copy_all(out, sources)
        return _Reached()

    def wait(self, mark: Mark) -> None:
        """Make the computing that is enqueued from now on wait for `mark`."""
        mark.synchronize()


class _Reached:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def open_copies(device: torch.device) -> CopyQueue:
    """Return the queue of copies for a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class BouncedCopies:
    """Copies from memory that is not pinned: the host first copies to a pinned buffer.

    The driver's own copy from such memory would block the calling thread until it is done.
    """

    def __init__(self, queue: CopyQueue, buffers: Sequence[torch.Tensor]) -> None:
        self._queue, self._buffers = queue, buffers
        self._sent: list[Mark | None] = [None] * len(buffers)
        self._turn = 0

    def mark(self) -> Mark:
        """Return a mark behind all computing that was enqueued so far."""
        return self._queue.mark()

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy the sources to `out` one after another, once `after` is reached; return the end."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        if (sent := self._sent[turn]) is not None:
            sent.synchronize()  # the last copy from this buffer has ended
        size = copy_all(self._buffers[turn], sources)
        done = self._queue.copy(out, [self._buffers[turn][:size]], after)
        self._sent[turn] = done
        return done

    def wait(self, mark: Mark) -> None:
        """Make the computing that is enqueued from now on wait for `mark`."""
        self._queue.wait(mark)


def copy_all(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> int:
    """Copy uint8 sources to `out` one after another; return their bytes. The host does not wait."""
    at = 0
    for source in sources:
        out[at : at + source.numel()].copy_(source.flatten(), non_blocking=True)
        at += source.numel()
    return at


class StagingRing:
    """Buffers of a device that copies fill and the computing reads, in turn."""

    def __init__(self, queue: CopyQueue, buffers: Sequence[torch.Tensor]) -> None:
        self._queue, self._buffers = queue, buffers
        # When each buffer had been read. None: unknown, because nothing was copied to it yet or
        # because a step failed; the next copy to it waits for all computing enqueued so far.
        self._free: list[Mark | None] = [None] * len(buffers)
        self._filled: deque[tuple[int, Mark]] = deque()  # buffers in turn, and when they are filled
        self._turn = 0

    @property
    def has_room(self) -> bool:
        """Whether a buffer is neither filled nor being filled."""
        return len(self._filled) < len(self._buffers)

    def send(self, sources: Sequence[torch.Tensor]) -> None:
        """Enqueue a copy that fills the next buffer as soon as it has been read."""
        assert self.has_room
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        free = self._free[turn] or self._queue.mark()
        done = self._queue.copy(self._buffers[turn], sources, free)
        self._filled.append((turn, done))

    def first(self) -> torch.Tensor:
        """Return the buffer that was filled first; the computing waits until it is filled."""
        turn, done = self._filled[0]
        self._queue.wait(done)
        return self._buffers[turn]

    def release(self) -> None:
        """Release the buffer that was filled first; all work that reads it has been enqueued."""
        turn, _ = self._filled.popleft()
        self._free[turn] = self._queue.mark()

    def forget(self) -> None:
        """Release all buffers, filled or not; the next copies may overwrite them."""
        self._filled.clear()  # copies that still run are done before later ones begin
        self._free = [None] * len(self._buffers)


class PinnedBuffer:
    """Pinned host memory that layers use one after another, since pinning takes long."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def views_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory shaped like some tensors; it overlaps what earlier calls returned."""
        ends = list(accumulate(aligned(x.nbytes) for x in tensors))
        if len(self._memory) < ends[-1]:
            self._memory = pinned_empty((ends[-1],), torch.uint8)
        return [
            self._memory[first : first + x.nbytes].view(x.dtype).view(x.shape)
            for first, x in zip([0, *ends], tensors, strict=False)
        ]


def read_back(tensors: Sequence[torch.Tensor], buffer: PinnedBuffer) -> list[torch.Tensor]:
    """Return copies of tensors in host memory; waits for the device."""
    if not tensors[0].is_cuda:
        return list(tensors)
    found = buffer.views_like(tensors)
    for host, x in zip(found, tensors, strict=True):
        host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return found


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return host memory, pinned if the system allows it."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    except RuntimeError:  # copies from memory that is not pinned are only slower
        return torch.empty(shape, dtype=dtype)


def on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor from host memory to a device; the host does not wait."""
    return pinned_empty(tuple(x.shape), x.dtype).copy_(x).to(device, non_blocking=True)


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Events before and after a wait of the computing, or a copy."""

    before: torch.cuda.Event
    after: torch.cuda.Event


class WaitClock:
    """Measures how long the computing of a GPU waits, without making the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: deque[_Span] = deque()  # not added up yet, in the order of the stream
        self._free: list[_Span] = []
        self._seconds = 0.0

    def timed(self, wait: Callable[[], Found]) -> Found:
        """Enqueue a wait of the computing by calling `wait`, and measure how long it takes."""
        self._add_up()
        timed = self._free.pop() if self._free else _Span(_event(), _event())
        stream = torch.cuda.current_stream(self._device)
        timed.before.record(stream)
        found = wait()
        timed.after.record(stream)
        self._waits.append(timed)
        return found

    def seconds(self) -> float:
        """Return the seconds of all waits that are over."""
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        while self._waits and self._waits[0].after.query():  # type: ignore[no-untyped-call]
            timed = self._waits.popleft()
            self._seconds += float(timed.before.elapsed_time(timed.after)) / 1000
            self._free.append(timed)


class CopyClock:
    """Measures how long copies on a stream take, without making the host wait."""

    def __init__(self, timed: Callable[[int, float], None]) -> None:
        self._timed = timed  # told bytes and seconds of each copy, in their order
        self._copies: deque[tuple[_Span, int]] = deque()  # not over yet, with their bytes
        self._free: list[_Span] = []

    def begin(self, stream: torch.cuda.Stream) -> _Span:
        """Note where a copy begins on its stream; report those that are over."""
        while self._copies and self._copies[0][0].after.query():  # type: ignore[no-untyped-call]
            over, size_bytes = self._copies.popleft()
            self._timed(size_bytes, float(over.before.elapsed_time(over.after)) / 1000)
            self._free.append(over)
        span = self._free.pop() if self._free else _Span(_event(), _event())
        span.before.record(stream)
        return span

    def end(self, span: _Span, stream: torch.cuda.Stream, size_bytes: int) -> None:
        """Note where the copy ends that was begun last."""
        span.after.record(stream)
        self._copies.append((span, size_bytes))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
