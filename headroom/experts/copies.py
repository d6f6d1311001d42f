"""Copies beside the work of a GPU: through buffers that are filled and read in turn."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar, cast

import torch

from headroom.kernels.cuda.buffers import aligned
from headroom.kernels.cuda.driver import copy_beside


class Mark(Protocol):
    """A point in a queue of work; a GPU's events are such."""

    def query(self) -> bool:
        """Tell whether it is reached."""

    def synchronize(self) -> None:
        """Wait until it is reached."""


class CopyQueue(Protocol):
    """Copies that run beside the computing of a device, in the order that they were asked for."""

    def mark(self) -> Mark:
        """Return where the computing stands now."""

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy to `out`, one source after another, when `after` is reached; return the end."""

    def wait(self, mark: Mark) -> None:
        """Let the computing go on when `mark` is reached."""


class CudaCopies:
    """Copies to and from a GPU on a stream of their own; the host's memory should be pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """Return where the computing stands now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy to `out`, one source after another, when `after` is reached; return the end."""
        # By the driver: to change torch's stream and back takes several times as long. Then nobody
        # but the caller keeps the memory until the end is reached, or sees that it is enough.
        assert out.is_contiguous()
        assert sum(source.nbytes for source in sources) <= out.nbytes
        self._stream.wait_event(cast(torch.cuda.Event, after))
        to, stream, device = out.data_ptr(), self._stream.cuda_stream, self._device.index or 0
        for source in sources:
            assert source.is_contiguous()
            copy_beside(to, source.data_ptr(), source.nbytes, stream, device)
            to += source.nbytes
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done

    def wait(self, mark: Mark) -> None:
        """Let the computing go on when `mark` is reached."""
        torch.cuda.current_stream(self._device).wait_event(cast(torch.cuda.Event, mark))


class HostCopies:
    """Copies within the host's memory, done when they are asked for."""

    def mark(self) -> Mark:
        """Return where the computing stands now."""
        return _Reached()

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy to `out`, one source after another, when `after` is reached; return the end."""
        after.synchronize()
        copy_all(out, sources)
        return _Reached()

    def wait(self, mark: Mark) -> None:
        """Let the computing go on when `mark` is reached."""
        mark.synchronize()


class _Reached:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def open_copies(device: torch.device) -> CopyQueue:
    """Return a queue of copies beside the computing of a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class BouncedCopies:
    """Copies from memory that is not pinned: the host brings each to a pinned buffer first.

    A copy by the driver itself would hold up whoever asks for it until it is done.
    """

    def __init__(self, queue: CopyQueue, buffers: Sequence[torch.Tensor]) -> None:
        self._queue, self._buffers = queue, buffers
        self._sent: list[Mark | None] = [None] * len(buffers)
        self._turn = 0

    def mark(self) -> Mark:
        """Return where the computing stands now."""
        return self._queue.mark()

    def copy(self, out: torch.Tensor, sources: Sequence[torch.Tensor], after: Mark) -> Mark:
        """Copy to `out`, one source after another, when `after` is reached; return the end."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        if (sent := self._sent[turn]) is not None:
            sent.synchronize()  # what it held is on the device
        size = copy_all(self._buffers[turn], sources)
        done = self._queue.copy(out, [self._buffers[turn][:size]], after)
        self._sent[turn] = done
        return done

    def wait(self, mark: Mark) -> None:
        """Let the computing go on when `mark` is reached."""
        self._queue.wait(mark)


def copy_all(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> int:
    """Copy sources in uint8 one after another, and return their bytes; nothing waits."""
    at = 0
    for source in sources:
        out[at : at + source.numel()].copy_(source.flatten(), non_blocking=True)
        at += source.numel()
    return at


class StagingRing:
    """Buffers of a device that copies fill and the computing reads, each in its turn."""

    def __init__(self, queue: CopyQueue, buffers: Sequence[torch.Tensor]) -> None:
        self._queue, self._buffers = queue, buffers
        # When a buffer had been read; None: it may be read until the next copy to it is asked for,
        # by another use of the memory before the first, or by a step that failed.
        self._free: list[Mark | None] = [None] * len(buffers)
        self._filled: deque[tuple[int, Mark]] = deque()  # buffers, and when they are
        self._turn = 0

    @property
    def has_room(self) -> bool:
        """Whether a buffer is neither filled nor on its way."""
        return len(self._filled) < len(self._buffers)

    def send(self, sources: Sequence[torch.Tensor]) -> None:
        """Fill the next buffer as soon as it has been read."""
        assert self.has_room
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        free = self._free[turn] or self._queue.mark()
        done = self._queue.copy(self._buffers[turn], sources, free)
        self._filled.append((turn, done))

    def first(self) -> torch.Tensor:
        """Return the buffer that was filled longest ago; the computing waits for it."""
        turn, done = self._filled[0]
        self._queue.wait(done)
        return self._buffers[turn]

    def release(self) -> None:
        """Give that buffer back: all work that reads it has been asked for."""
        turn, _ = self._filled.popleft()
        self._free[turn] = self._queue.mark()

    def forget(self) -> None:
        """Let everything that was sent and not read be overwritten."""
        self._filled.clear()  # later copies run after these
        self._free = [None] * len(self._buffers)


class PinnedBuffer:
    """Pinned host memory that one layer after another uses: to pin some anew may take long."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return room for such tensors; it ends what was returned before."""
        ends = list(accumulate(aligned(x.nbytes) for x in tensors))
        if len(self._memory) < ends[-1]:
            self._memory = pinned_empty((ends[-1],), torch.uint8)
        return [
            self._memory[first : first + x.nbytes].view(x.dtype).view(x.shape)
            for first, x in zip([0, *ends], tensors, strict=False)
        ]


def read_back(tensors: Sequence[torch.Tensor], kept: PinnedBuffer) -> list[torch.Tensor]:
    """Return tensors in host memory; this waits for the device."""
    if not tensors[0].is_cuda:
        return list(tensors)
    found = kept.like(tensors)
    for host, x in zip(found, tensors, strict=True):
        host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return found


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return host memory, pinned where the system allows it."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    except RuntimeError:  # copies from it take longer, and give the same
        return torch.empty(shape, dtype=dtype)


def on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor of the host's on a device; nobody waits for it."""
    return pinned_empty(tuple(x.shape), x.dtype).copy_(x).to(device, non_blocking=True)


Found = TypeVar("Found")
Pair = tuple[torch.cuda.Event, torch.cuda.Event]  # before and after a wait


class WaitClock:
    """Adds up the times between events of the computing's stream, once they are reached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: deque[Pair] = deque()  # in the order that they will be reached
        self._free: list[Pair] = []
        self._seconds = 0.0

    def timed(self, wait: Callable[[], Found]) -> Found:
        """Let the computing wait as asked for, and measure it; the host goes on at once."""
        self._add_up()
        before, after = self._free.pop() if self._free else (_event(), _event())
        stream = torch.cuda.current_stream(self._device)
        before.record(stream)
        found = wait()
        after.record(stream)
        self._pairs.append((before, after))
        return found

    def seconds(self) -> float:
        """Return all waits so far that are over."""
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        while self._pairs and self._pairs[0][1].query():  # type: ignore[no-untyped-call]
            before, after = pair = self._pairs.popleft()
            self._seconds += float(before.elapsed_time(after)) / 1000
            self._free.append(pair)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
