"""Buffers that copies fill and the computing reads in turn, on the stand-in GPU."""

from collections.abc import Iterator

import pytest
import torch

from headroom.experts import copies
from headroom.experts.copies import BouncedCopies, CudaCopies, StagingRing, WaitClock
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

# Copies read it when they run, so that it must live as long.
NUMBERS = torch.arange(256, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    with stand_in_gpu(monkeypatch) as made:
        yield made


def numbers(first: int, count: int = 4) -> torch.Tensor:
    return NUMBERS[first : first + count]


def open_queue() -> CudaCopies:
    return CudaCopies(torch.device("cuda", 0))


@pytest.fixture
def memory(gpu: StandInGpu) -> Iterator[torch.Tensor]:
    """Two buffers, which live until every copy to them has run."""
    made = torch.zeros(2, 8, dtype=torch.uint8, device="cuda")
    yield made
    torch.cuda.synchronize()


def test_buffers_are_read_in_the_order_that_they_were_sent(memory: torch.Tensor) -> None:
    ring = StagingRing(open_queue(), memory.unbind())
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


def test_a_buffer_is_filled_again_only_after_what_read_it(
    gpu: StandInGpu, memory: torch.Tensor
) -> None:
    ring = StagingRing(open_queue(), memory.unbind())
    for turn in range(3):
        ring.send([numbers(turn)])
        ring.first()
        before = gpu.queues.main.marks
        ring.release()
        assert gpu.queues.main.marks == before + 1
    (side,) = gpu.queues.streams[1:]
    # The third goes to the buffer of the first, when the first's reading was marked.
    assert side.waited_marks == [1, 3, 2]
    assert [copy.to for copy in gpu.driver.copies] == [
        memory[turn].data_ptr() for turn in (0, 1, 0)
    ]


def test_the_stand_in_finds_a_buffer_that_may_be_read_still(gpu: StandInGpu) -> None:
    queue, buffer = open_queue(), torch.zeros(8, dtype=torch.uint8, device="cuda")
    before = queue.mark()
    queue.wait(queue.copy(buffer, [numbers(1)], before))
    with pytest.raises(AssertionError, match="may be read still"):
        queue.copy(buffer, [numbers(2)], before)


def test_released_buffers_are_filled_again(memory: torch.Tensor) -> None:
    ring = StagingRing(open_queue(), memory.unbind())
    ring.send([numbers(1)])
    ring.send([numbers(5)])
    ring.forget()
    ring.send([numbers(9)])
    assert ring.first()[:4].tolist() == [9, 10, 11, 12]


def test_a_forgotten_buffer_that_a_failed_step_reads_is_filled_only_after_that(
    gpu: StandInGpu,
    memory: torch.Tensor,
) -> None:
    ring = StagingRing(open_queue(), memory.unbind())
    for turn in range(3):  # each buffer was read at least once, and marked then
        ring.send([numbers(turn)])
        ring.first()
        if turn < 2:
            ring.release()
    seen = gpu.queues.main.marks
    ring.forget()  # the step failed while it read the first buffer
    for turn in range(2):
        ring.send([numbers(10 * turn)])
    (side,) = gpu.queues.streams[1:]
    assert min(side.waited_marks[-2:]) > seen
    assert [copy.to for copy in gpu.driver.copies[-2:]] == [
        memory[turn].data_ptr() for turn in (1, 0)
    ]


def test_memory_that_is_not_pinned_goes_through_buffers_that_are(
    gpu: StandInGpu, memory: torch.Tensor
) -> None:
    pinned = [torch.zeros(8, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    ring = StagingRing(BouncedCopies(open_queue(), pinned), memory.unbind())
    found = []
    for turn in range(5):
        ring.send([numbers(10 * turn), numbers(10 * turn + 5, 1)])
        if turn:
            found.append(ring.first()[:5].tolist())
            ring.release()
    assert found == [[10 * turn + i for i in (0, 1, 2, 3, 5)] for turn in range(4)]
    assert {copy.source for copy in gpu.driver.copies} == {buffer.data_ptr() for buffer in pinned}


def test_a_bouncing_buffer_is_not_overwritten_before_it_was_sent(gpu: StandInGpu) -> None:
    queue, pinned = open_queue(), [torch.zeros(4, dtype=torch.uint8, pin_memory=True)]
    bounced = BouncedCopies(queue, pinned)
    outs = torch.zeros(2, 4, dtype=torch.uint8, device="cuda")
    start = queue.mark()
    for out, first in zip(outs, (1, 5), strict=True):
        done = bounced.copy(out, [numbers(first)], start)
    bounced.wait(done)
    assert outs.flatten().tolist() == [*range(1, 9)]


def test_copies_to_a_gpu_wait_for_a_mark_and_the_computing_for_them(gpu: StandInGpu) -> None:
    gpu.queues.stepped = True
    queue, out = open_queue(), torch.zeros(8, dtype=torch.uint8, device="cuda")
    before = torch.empty(4, dtype=torch.uint8, device="cuda")
    before.copy_(numbers(1), non_blocking=True)  # work of the main stream that has not run yet
    done = queue.copy(out, [numbers(1), numbers(7)], queue.mark())
    main, side = gpu.queues.streams
    assert not side.advance()
    assert main.advance()
    assert main.advance()
    assert (side.advance(), done.query()) == (True, False)
    queue.wait(done)
    assert done.query()
    assert out.tolist() == [1, 2, 3, 4, 7, 8, 9, 10]


def test_memory_that_cannot_be_pinned_is_plain(gpu: StandInGpu) -> None:
    pinned = copies.pinned_empty((4,), torch.uint8)
    gpu.driver.refuse_to_pin()
    plain = copies.pinned_empty((4,), torch.uint8)
    assert (gpu.is_pinned(pinned), gpu.is_pinned(plain)) == (True, False)
    assert copies.on_device(numbers(3), torch.device("cuda", 0)).tolist() == [3, 4, 5, 6]


def test_host_tensors_are_read_where_they_are() -> None:
    here = numbers(1)
    assert copies.read_back([here], copies.PinnedBuffer())[0] is here


def test_tensors_of_a_gpu_are_read_once_they_are_computed(gpu: StandInGpu) -> None:
    there = [numbers(1).to("cuda"), torch.ones(3, 2, device="cuda") * 5]
    found = copies.read_back(there, copies.PinnedBuffer())
    assert not any(x.is_cuda for x in found)
    assert [x.tolist() for x in found] == [[1, 2, 3, 4], [[5.0, 5.0]] * 3]


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


def late_work(count: int) -> None:
    """Enqueue work that takes the computing so many milliseconds."""
    for _ in range(count):
        torch.empty(4, dtype=torch.uint8, device="cuda").copy_(numbers(1), non_blocking=True)


def test_waits_are_added_up_once_they_are_over(gpu: StandInGpu) -> None:
    gpu.queues.stepped = True
    clock = WaitClock(torch.device("cuda", 0))
    late_work(1)
    clock.timed(lambda: late_work(4))
    clock.timed(lambda: late_work(2))
    finished = gpu.queues.main
    seconds = []
    while finished.busy:
        finished.advance()
        seconds.append((finished.finished, clock.seconds()))
    assert finished.finished == 7
    for count, found in seconds:
        assert found == pytest.approx(0.0 if count < 5 else 0.004 if count < 7 else 0.006)
    assert clock.seconds() == pytest.approx(0.006)


def test_the_events_of_a_wait_are_reused(gpu: StandInGpu) -> None:
    clock = WaitClock(torch.device("cuda", 0))
    for _ in range(10):
        assert clock.timed(lambda: late_work(1) or "found") == "found"
        torch.cuda.synchronize()
    assert gpu.queues.timed_events == 2
    assert clock.seconds() == pytest.approx(0.010)


def test_work_around_a_wait_is_not_measured(gpu: StandInGpu) -> None:
    clock = WaitClock(torch.device("cuda", 0))
    late_work(3)
    clock.timed(lambda: None)
    late_work(3)
    torch.cuda.synchronize()
    assert clock.seconds() == 0.0


def test_the_time_of_each_copy_is_told_once_it_is_over(gpu: StandInGpu) -> None:
    told: list[tuple[int, float]] = []
    queue = CudaCopies(torch.device("cuda", 0), lambda *copy: told.append(copy))
    buffer = torch.zeros(8, dtype=torch.uint8, device="cuda")
    for turn in range(6):
        queue.wait(queue.copy(buffer, [numbers(turn), numbers(20, turn % 2)], queue.mark()))
        assert len(told) == turn  # a copy is told when the next one begins
    assert [size for size, _ in told] == [4, 5, 4, 5, 4]
    # Each piece takes the stand-in a millisecond.
    assert [seconds for _, seconds in told] == pytest.approx([0.002] * 5)
    assert gpu.queues.timed_events == 2  # which are used again and again
    gpu.kept.append(buffer)


def test_copies_that_nobody_times_record_no_time(gpu: StandInGpu) -> None:
    queue, buffer = open_queue(), torch.zeros(8, dtype=torch.uint8, device="cuda")
    queue.wait(queue.copy(buffer, [numbers(1)], queue.mark()))
    assert gpu.queues.timed_events == 0
    gpu.kept.append(buffer)
