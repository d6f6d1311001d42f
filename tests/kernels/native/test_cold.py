"""ColdWorker, which computes cold experts, asked by the stand-in GPU's side of the mailbox."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.cuda.handover import MOST_ROWS, WORDS, Mailbox
from headroom.kernels.native import experts as native_experts
from headroom.kernels.native.cold import ColdTable, ColdWorker
from headroom.kernels.native.module import MODULE
from tests.kernels.cases import random_choice, random_experts
from tests.kernels.native.test_experts_tiles import tile_table
from tests.stand_in.mailbox import WAIT_S, MailboxGpu

pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
EXPERTS, USED, HIDDEN, WIDTH = 6, 2, 64, 32
# Ends of the messages about a bad request.
LIMITS = f"there are 2 cold layers, and a request has 1 to {MOST_ROWS} rows"
NOT_HELD = "which is not in host memory"


@pytest.fixture
def layers() -> list[native_experts.PanelTable]:
    """Two layers of random experts in tiles."""
    torch.manual_seed(0)
    kinds = (BY_NAME["q8_0"],) * 3
    return [tile_table(random_experts(kinds, EXPERTS, HIDDEN, WIDTH)) for _ in range(2)]


@pytest.fixture
def box() -> Mailbox:
    return Mailbox.allocate(HIDDEN, 2, "cpu")


@pytest.fixture
def worker(layers: list[native_experts.PanelTable], box: Mailbox) -> Iterator[ColdWorker]:
    """A worker that knows both layers."""
    tables = [
        ColdTable(layer.addresses, layer.kinds, WIDTH, HIDDEN, USED, "silu") for layer in layers
    ]
    made = ColdWorker(box.addresses, tables, MOST_ROWS)
    yield made
    made.close()


def test_requests_of_many_steps_are_answered(
    worker: ColdWorker, layers: list[native_experts.PanelTable], box: Mailbox
) -> None:
    gpu, wrong = MailboxGpu(box), []

    def run() -> None:
        for step in range(20):
            worker.begin_step()
            for index, layer in enumerate(layers):
                rows = 1 + step % MOST_ROWS
                x, (ids, weights) = torch.randn(rows, HIDDEN), random_choice(rows, EXPERTS, USED)
                gpu.ask(index, x, ids, weights)
                found = gpu.answer(rows)
                wanted = native_experts.experts(x, ids, weights, layer, "silu", "int24")
                if not torch.equal(found, wanted):
                    wrong.append((step, index))
            gpu.end_step()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(240)
    assert gpu.number == 40
    assert not wrong
    assert (worker.counts.requests, worker.failure) == (40, "")
    assert worker.counts.busy_ns > 0


def test_a_request_without_begin_step_is_answered_too(
    worker: ColdWorker, layers: list[native_experts.PanelTable], box: Mailbox
) -> None:
    gpu, until = MailboxGpu(box), time.monotonic() + WAIT_S
    while not worker.counts.sleeps:
        assert time.monotonic() < until, "it never sleeps"
        time.sleep(0.001)
    x, (ids, weights) = torch.randn(1, HIDDEN), random_choice(1, EXPERTS, USED)
    gpu.ask(0, x, ids, weights)
    wanted = native_experts.experts(x, ids, weights, layers[0], "silu", "int24")
    assert torch.equal(gpu.answer(1), wanted)


def test_a_worker_sleeps_between_steps_and_wakes_for_the_next(
    worker: ColdWorker, layers: list[native_experts.PanelTable], box: Mailbox
) -> None:
    gpu = MailboxGpu(box)
    for step in range(1, 4):
        until = time.monotonic() + WAIT_S
        while worker.counts.sleeps < step and time.monotonic() < until:
            time.sleep(0.001)
        assert worker.counts.sleeps == step
        worker.begin_step()
        gpu.ask(0, torch.ones(1, HIDDEN), *random_choice(1, EXPERTS, USED))
        assert gpu.answer(1).any()
        gpu.end_step()


@pytest.mark.slow
def test_no_step_is_slept_through(worker: ColdWorker, box: Mailbox) -> None:
    gpu, x, picks = MailboxGpu(box), torch.ones(1, HIDDEN), random_choice(1, EXPERTS, USED)
    for step in range(8000):  # each begins about when the worker falls asleep
        until = time.perf_counter() + (0.9 + 0.3 * (step % 97) / 97) / 1000
        while time.perf_counter() < until:
            pass
        worker.begin_step()
        gpu.ask(0, x, *picks)
        gpu.answer(1)
        gpu.end_step()
    assert worker.counts.sleeps > 100


def test_each_layer_has_counts_of_its_own_and_an_answer_says_how_long_it_took(
    worker: ColdWorker, box: Mailbox
) -> None:
    gpu, busy_ns = MailboxGpu(box), [0, 0]
    for layer, experts in ((0, [0, 1]), (1, [2, 2]), (1, [3, -1])):
        gpu.ask(layer, torch.ones(1, HIDDEN), torch.tensor([experts]).int(), torch.ones(1, USED))
        gpu.answer(1)
        busy_ns[layer] += int(box.words[WORDS["ANSWER"] + 1])
    until = time.monotonic() + WAIT_S
    while worker.counts.requests < 3 or worker.layer_counts()[1].requests < 2:
        assert time.monotonic() < until, "an answer is not counted"
    total, (first, second) = worker.counts, worker.layer_counts()
    assert [(one.requests, one.experts) for one in (first, second)] == [(1, 2), (2, 2)]
    assert first.read_bytes == second.read_bytes == total.read_bytes // 2
    assert min(busy_ns) > 0
    assert [first.busy_ns, second.busy_ns] == busy_ns


def test_counts_can_be_read_after_the_thread_has_ended(worker: ColdWorker, box: Mailbox) -> None:
    gpu = MailboxGpu(box)
    worker.begin_step()
    gpu.ask(0, torch.ones(1, HIDDEN), *random_choice(1, EXPERTS, USED))
    gpu.answer(1)
    worker.close()
    worker.close()
    assert (worker.counts.picks, worker.failure) == (2, "")


def test_steps_without_begin_step_do_not_end_later_ones(worker: ColdWorker, box: Mailbox) -> None:
    gpu = MailboxGpu(box)
    for _ in range(3):
        gpu.end_step()
    worker.begin_step()
    time.sleep(0.05)  # long enough to fall asleep, were the step thought to have ended
    slept = worker.counts.sleeps
    gpu.ask(1, torch.ones(2, HIDDEN), *random_choice(2, EXPERTS, USED))
    gpu.answer(2)
    assert worker.counts.sleeps == slept


@pytest.mark.parametrize(
    ("layer", "expert", "reason"),
    [
        (2, 0, f"a request is for cold layer 2 and 1 rows; {LIMITS}"),
        (-1, 0, f"a request is for cold layer -1 and 1 rows; {LIMITS}"),
        (0, EXPERTS, f"a request for cold layer 0 picks expert {EXPERTS}, {NOT_HELD}"),
        (1, 3, f"a request for cold layer 1 picks expert 3, {NOT_HELD}"),
    ],
)
def test_a_bad_request_is_answered_and_remembered(
    worker: ColdWorker,
    layers: list[native_experts.PanelTable],
    box: Mailbox,
    layer: int,
    expert: int,
    reason: str,
) -> None:
    layers[1].addresses[3] = 0
    gpu = MailboxGpu(box)
    worker.begin_step()
    gpu.ask(layer, torch.ones(1, HIDDEN), torch.tensor([[-1, expert]]).int(), torch.ones(1, USED))
    gpu.answer(1)
    assert worker.failure == reason
    assert box.failed


def test_experts_are_counted_once_a_request(
    worker: ColdWorker, layers: list[native_experts.PanelTable], box: Mailbox
) -> None:
    gpu = MailboxGpu(box)
    worker.begin_step()
    ids = torch.tensor([[1, 4], [4, -1], [-1, -1]]).int()
    gpu.ask(0, torch.ones(3, HIDDEN), ids, torch.ones(3, USED))
    assert not gpu.answer(3)[2].any()
    counts = worker.counts
    while not counts.busy_ns:
        counts = worker.counts
    assert (counts.picks, counts.experts) == (3, 2)
    assert counts.read_bytes == 2 * layers[0].blobs.shape[1]
