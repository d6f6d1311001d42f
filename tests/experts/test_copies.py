"""Buffers that copies fill and the computing reads in turn."""

import ctypes
from dataclasses import dataclass, field
from unittest.mock import MagicMock, call

import pytest
import torch

from headroom.experts import copies
from headroom.experts.copies import BouncedCopies, CudaCopies, StagingRing, WaitClock
from tests.experts.cold_layer import FakeMark, LateCopies


def numbers(first: int, count: int = 4) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.uint8)


def open_ring(queue: object) -> tuple[StagingRing, torch.Tensor]:
    memory = torch.zeros(2, 8, dtype=torch.uint8)
    return StagingRing(queue, memory.unbind()), memory  # type: ignore[arg-type]


def test_buffers_are_read_in_the_order_that_they_were_sent() -> None:
    ring, _ = open_ring(LateCopies())
    ring.send([numbers(1), numbers(11, 2)])
    ring.send([numbers(21)])
    assert not ring.has_room
    assert ring.first()[:6].tolist() == [1, 2, 3, 4, 11, 12]
    ring.release()
    assert ring.has_room
    ring.send([numbers(31)])
    assert ring.first()[:4].tolist() == [21, 22, 23, 24]
    ring.release()
    assert ring.first()[:4].tolist() == [31, 32, 33, 34]


def test_a_buffer_is_filled_again_only_after_what_read_it() -> None:
    queue = MagicMock(wraps=LateCopies())
    ring, memory = open_ring(queue)
    for turn in range(3):
        ring.send([numbers(turn)])
        ring.first()
        before = queue.mark.call_count
        ring.release()
        assert queue.mark.call_count == before + 1
    after = [call.args[2].number for call in queue.copy.call_args_list]
    # The third goes to the buffer of the first, when the first's reading was marked.
    assert after == [1, 3, 2]
    outs = [call.args[0].data_ptr() for call in queue.copy.call_args_list]
    assert outs == [memory[turn % 2].data_ptr() for turn in range(3)]


def test_the_copies_that_tests_use_find_a_buffer_that_may_be_read_still() -> None:
    queue, buffer = LateCopies(), torch.zeros(8, dtype=torch.uint8)
    before = queue.mark()
    queue.wait(queue.copy(buffer, [numbers(1)], before))
    with pytest.raises(AssertionError, match="may be read still"):
        queue.copy(buffer, [numbers(2)], before)


def test_forgotten_buffers_are_sent_to_again() -> None:
    ring, _ = open_ring(LateCopies())
    ring.send([numbers(1)])
    ring.send([numbers(5)])
    ring.forget()
    ring.send([numbers(9)])
    assert ring.first()[:4].tolist() == [9, 10, 11, 12]


def test_a_forgotten_buffer_that_a_failed_step_reads_is_filled_only_after_that() -> None:
    queue = MagicMock(wraps=LateCopies())
    ring, memory = open_ring(queue)
    for turn in range(3):  # each buffer was read at least once, and marked then
        ring.send([numbers(turn)])
        ring.first()
        if turn < 2:
            ring.release()
    seen = queue.mark.call_count
    ring.forget()  # the step failed while it read the first buffer
    for turn in range(2):
        ring.send([numbers(10 * turn)])
    copies_after = queue.copy.call_args_list[-2:]
    assert all(call.args[2].number > seen for call in copies_after)
    assert [call.args[0].data_ptr() for call in copies_after] == [
        memory[turn].data_ptr() for turn in (1, 0)
    ]


def test_memory_that_is_not_pinned_goes_through_buffers_that_are() -> None:
    queue = LateCopies()
    pinned = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    ring, _ = open_ring(BouncedCopies(queue, pinned))  # type: ignore[arg-type]
    found = []
    for turn in range(5):
        ring.send([numbers(10 * turn), numbers(10 * turn + 5, 1)])
        if turn:
            found.append(ring.first()[:5].tolist())
            ring.release()
    assert found == [[10 * turn + i for i in (0, 1, 2, 3, 5)] for turn in range(4)]
    rooms = {buffer.data_ptr() for buffer in pinned}
    assert {source.data_ptr() for source in queue.sources} == rooms


def test_a_bouncing_buffer_is_not_overwritten_before_it_was_sent() -> None:
    queue, pinned = LateCopies(), [torch.zeros(4, dtype=torch.uint8)]
    bounced = BouncedCopies(queue, pinned)  # type: ignore[arg-type]
    outs = torch.zeros(2, 4, dtype=torch.uint8)
    start = FakeMark(1)
    for out, first in zip(outs, (1, 5), strict=True):
        done = bounced.copy(out, [numbers(first)], start)  # type: ignore[arg-type]
    bounced.wait(done)
    assert outs.flatten().tolist() == [*range(1, 9)]


def test_copies_to_a_gpu_wait_for_a_mark_and_the_computing_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = MagicMock()
    monkeypatch.setattr(copies.torch, "cuda", cuda)
    side = cuda.Stream.return_value
    side.cuda_stream = 77

    def copy_async(to: int, source: int, size: int, stream: int, device: int) -> None:
        assert (stream, device) == (77, 1)
        side.wait_event.assert_called_once_with(mark)
        assert call(side) not in cuda.Event.return_value.record.call_args_list
        ctypes.memmove(to, source, size)

    monkeypatch.setattr(copies, "copy_async", copy_async)
    queue, out = CudaCopies(torch.device("cuda", 1)), torch.zeros(8, dtype=torch.uint8)
    mark = queue.mark()
    mark.record.assert_called_once_with(cuda.current_stream.return_value)
    done = queue.copy(out, [numbers(1), numbers(7)], mark)
    side.wait_event.assert_called_once_with(mark)
    done.record.assert_called_with(side)
    assert out.tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    queue.wait(done)
    cuda.current_stream.return_value.wait_event.assert_called_once_with(done)


def test_memory_that_cannot_be_pinned_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = torch.empty

    def refuse(shape: tuple[int, ...], *, pin_memory: bool = False, **how: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed")
        return taken(shape, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refuse)
    assert copies.on_device(numbers(3), torch.device("cpu")).tolist() == [3, 4, 5, 6]


def test_host_tensors_are_read_where_they_are() -> None:
    here = numbers(1)
    assert copies.read_back([here], copies.PinnedBuffer())[0] is here


def test_kept_memory_is_used_again_and_grows_where_it_must() -> None:
    kept = copies.PinnedBuffer()
    few, rows = torch.zeros(3, dtype=torch.uint8), torch.zeros(5, 4)
    a, b = kept.views_like([few, rows])
    assert (a.shape, a.dtype, b.shape, b.dtype) == (few.shape, few.dtype, rows.shape, rows.dtype)
    a.fill_(7)
    b.fill_(1.0)
    assert a.tolist() == [7, 7, 7]
    assert kept.views_like([few])[0].data_ptr() == a.data_ptr()
    assert kept.views_like([rows])[0].data_ptr() == a.data_ptr()
    (larger,) = kept.views_like([torch.zeros(1000, 4)])
    assert larger.shape == (1000, 4)
    assert kept.views_like([few])[0].data_ptr() == larger.data_ptr()


@dataclass(eq=False)
class Gpu:
    """Events are reached in their order, when a test says so."""

    recorded: list["Event"] = field(default_factory=list)
    made: int = 0

    def event(self, enable_timing: bool = False) -> "Event":
        assert enable_timing
        self.made += 1
        return Event(self)

    def reach(self, at_ms: float, count: int) -> None:
        for event in self.recorded[:count]:
            event.at_ms = at_ms
        del self.recorded[:count]


@dataclass(eq=False)
class Event:
    gpu: Gpu
    at_ms: float | None = None

    def record(self, stream: object) -> None:
        self.at_ms = None
        self.gpu.recorded.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, later: "Event") -> float:
        assert self.at_ms is not None
        assert later.at_ms is not None
        return later.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(copies.torch.cuda, "Event", made.event)
    monkeypatch.setattr(copies.torch.cuda, "current_stream", lambda device: None)
    return made


def test_waits_are_added_up_once_they_are_over(gpu: Gpu) -> None:
    clock = WaitClock(torch.device("cuda"))
    assert [clock.timed(lambda: "found") for _ in range(2)] == ["found"] * 2
    assert clock.seconds() == 0.0
    gpu.reach(10.0, 1)
    assert clock.seconds() == 0.0  # it still waits
    gpu.reach(14.0, 1)
    assert clock.seconds() == pytest.approx(0.004)
    assert clock.seconds() == pytest.approx(0.004)
    gpu.reach(20.0, 1)
    gpu.reach(21.5, 1)
    assert clock.seconds() == pytest.approx(0.0055)


def test_events_are_used_again(gpu: Gpu) -> None:
    clock = WaitClock(torch.device("cuda"))
    for step in range(10):
        clock.timed(lambda: None)
        gpu.reach(step, 1)
        gpu.reach(step + 1, 1)
    assert gpu.made == 2
    assert clock.seconds() == pytest.approx(0.010)


def test_what_is_waited_for_is_asked_for_between_the_two_events(gpu: Gpu) -> None:
    clock = WaitClock(torch.device("cuda"))
    assert clock.timed(lambda: len(gpu.recorded)) == 1
    assert len(gpu.recorded) == 2
