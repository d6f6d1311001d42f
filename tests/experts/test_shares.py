"""The tables of a GPU's layers follow its CPU between steps, and nothing waits for it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from headroom.experts.controller import PROBE_FIRST_S
from headroom.experts.copies import Mark
from headroom.experts.decode import DecodeWorker
from headroom.experts.shares import (
    LOGGED_EVERY_S,
    READ_EVERY_S,
    LinkTables,
    ShareKeeper,
    ShareTables,
    most_misses,
)
from headroom.experts.store import ExpertStore
from headroom.kernels.cuda.handover import COUNTS
from headroom.kernels.native.cold import LayerCounts
from headroom.plan.cost_model import ColdSpeeds, link_shares
from tests.experts.stores import blob_layout, small_store
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.streams import Queues
from tests.stand_in.tensors import no_waits, plain

SPEEDS = ColdSpeeds(gpu=3e12, link=50e9, cpu=77e9, handover_s=10e-6)
LARGE, SMALL = (600_000, 600_000, 600_000), (400_000, 400_000, 400_000)
STEP_S = 0.002


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU whose copies run when somebody waits for them, or when a test lets them."""
    with stand_in_gpu(monkeypatch) as made:
        made.queues.stepped = True
        yield made


def open_cold(
    sizes: Sequence[tuple[int, ...]], cold: str = "auto", pin: bool = True
) -> ExpertStore:
    """Return a store of layers of four experts, one of them hot."""
    layouts = [blob_layout(4, size) for size in sizes]
    return small_store(
        list(layouts), [(0,)] * len(sizes), "cuda:0", cold=cold, pin=pin, speeds=SPEEDS
    )


class CountedWorker(DecodeWorker):
    """A worker of which only the counters are there, and a GPU's counters."""

    def __init__(self, layers: int) -> None:
        self.done = (1 << 32) - 3  # so that the number of steps passes its end
        self.asked = [[0, 0, 0, 0] for _ in range(layers)]  # as LayerCounts
        self.counts_on_gpu = torch.zeros(layers, len(COUNTS), dtype=torch.int64, device="cuda:0")

    @property
    def box(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(counts=self.counts_on_gpu)

    @property
    def steps(self) -> int:
        return self.done % (1 << 32)

    def layer_counts(self) -> list[LayerCounts]:
        return [LayerCounts(*row) for row in self.asked]

    def close(self) -> None:
        pass


class Case:
    """A store's tables, their keeper, and a time that passes when a test says so."""

    def __init__(self, store: ExpertStore) -> None:
        self.store, self.now_s = store, 100.0
        self.layers = [layer for layer in store.layers if layer is not None]
        self.worker = CountedWorker(len(self.layers))
        self.tables = ShareTables(store, SPEEDS, "auto")
        mark = store.spare.copies.mark
        self.keeper = ShareKeeper(self.worker, self.tables, mark, lambda: self.now_s)
        self.cpu = SPEEDS.cpu
        self.pieces = 100  # of late copies that run between two steps

    def table(self, layer: int) -> tuple[int, ...]:
        """Return what the next step would read."""
        table = self.tables.of_layer(self.layers[layer])
        Queues.current().main.drain()
        return tuple(plain(table).tolist())

    def step(self) -> None:
        """Run a step of a row whose experts are all cold."""
        self.now_s += STEP_S
        self.worker.done += 1
        for number, layer in enumerate(self.layers):
            misses = 1  # of one used expert
            kept = self.table(number)[misses]
            row = self.worker.asked[number]
            if misses > kept:
                busy_ns = round((misses - kept) * layer.expert_bytes / self.cpu * 1e9)
                row[0] += 1
                row[1] += misses - kept
                row[3] += busy_ns
                plain(self.worker.counts_on_gpu)[number, COUNTS.index("hot_ns")] += 12_000
                late_ns = 10_000
                plain(self.worker.counts_on_gpu)[number, COUNTS.index("late_ns")] += late_ns
                plain(self.worker.counts_on_gpu)[number, COUNTS.index("lates")] += 1
            plain(self.worker.counts_on_gpu)[number, COUNTS.index("gpu_picks")] += kept

    def run(self, seconds: float) -> None:
        """Run steps for some time, and the keeper between them."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.step()
            with no_waits():
                self.keeper.follow()
            Queues.current().finish()


def test_all_layers_of_one_size_have_one_table_and_lie_in_one_tensor() -> None:
    store = open_cold([LARGE, SMALL, LARGE])
    tables = ShareTables(store, SPEEDS, "auto")
    assert [group.layers for group in tables.groups] == [[0, 2], [1]]
    found = [tables.of_layer(layer) for layer in store.layers if layer is not None]
    assert found[2].data_ptr() - found[0].data_ptr() == found[0].nbytes
    for layer, table in zip(store.layers, found, strict=True):
        assert layer is not None
        assert table.dtype == torch.int32
        wanted = link_shares(SPEEDS, layer.expert_bytes, 1, most_misses(4, 1))
        assert tuple(table.cpu().tolist()) == wanted
    assert (most_misses(256, 8), most_misses(512, 10), most_misses(4, 1)) == (256, 320, 4)


@pytest.mark.parametrize(("cold", "pin"), [("cpu", True), ("auto", False), ("cpu", False)])
def test_a_fixed_way_has_tables_that_give_all_to_the_cpu_and_nobody_who_changes_them(
    cold: str, pin: bool
) -> None:
    store = open_cold([LARGE, SMALL], cold, pin)
    tables = ShareTables(store, SPEEDS, cold)
    assert tables.controller is None
    for layer in store.layers:
        assert layer is not None
        assert tables.of_layer(layer).cpu().tolist() == [0] * 5


def test_layers_that_ask_nobody_have_no_tables() -> None:
    assert ShareTables(open_cold([LARGE], "gpu"), SPEEDS, "gpu").groups == []
    assert ShareTables(open_cold([LARGE], "gpu"), SPEEDS, "gpu").controller is None


def test_a_busy_cpu_gets_less_within_a_second_and_all_again_when_it_is_quiet() -> None:
    case = Case(open_cold([LARGE, SMALL]))
    quiet = case.keeper.now
    assert (quiet.share, quiet.pace) == (1.0, pytest.approx(1.0))
    first = [case.table(0), case.table(1)]
    case.run(3.0)
    assert [case.table(0), case.table(1)] == first
    case.cpu = 10e9
    case.run(1.0)
    busy = case.keeper.now
    assert (busy.share, busy.pace < 0.3) == (0.0, True)
    assert case.table(0)[1] == case.table(1)[1] == 1
    case.cpu = SPEEDS.cpu
    case.run(12.0)
    assert case.keeper.now.share == 1.0
    assert case.table(0)[1] == case.table(1)[1] == 0


def test_while_the_cpu_gets_nothing_one_layer_after_the_other_tries_it() -> None:
    case = Case(open_cold([LARGE, LARGE, LARGE]))
    case.run(1.0)
    case.cpu = 1e9
    case.run(1.0)
    tried: list[int] = []
    before = [list(row) for row in case.worker.asked]
    for _ in range(round(8 * PROBE_FIRST_S / STEP_S)):
        case.run(STEP_S)
        asks = [layer for layer in range(3) if case.worker.asked[layer][0] > before[layer][0]]
        before = [list(row) for row in case.worker.asked]
        assert len(asks) <= 1
        tried += [layer for layer in asks if tried[-1:] != [layer]]
    assert len(tried) >= 2
    assert len(set(tried)) == len(tried)


def test_the_counters_are_read_now_and_then_and_tables_written_only_if_they_change(
    gpu: StandInGpu,
) -> None:
    case = Case(open_cold([LARGE, SMALL]))
    gpu.queues.finish()
    gpu.queues.asked = 0
    case.run(2.0)
    # One copy for each reading; none for tables, which stay.
    assert gpu.queues.asked <= 2.0 / READ_EVERY_S + 1
    assert gpu.queues.asked >= 1.0 / READ_EVERY_S
    case.cpu = 10e9
    case.run(1.0)
    assert gpu.queues.asked <= 3.0 / READ_EVERY_S + 1 + 6


def test_a_table_that_the_gpu_still_reads_is_not_written_over(gpu: StandInGpu) -> None:
    store = open_cold([LARGE])
    mark, tables = store.spare.copies.mark, LinkTables(2, (0, 0, 0), torch.device("cuda:0"))
    gpu.queues.finish()
    assert tables.write([(0, 1, 1), (0, 0, 1)], mark)
    assert not tables.write([(9, 9, 9)] * 2, mark)  # the first copy has not run
    gpu.queues.finish()
    assert [tables.of_layer(layer).cpu().tolist() for layer in (0, 1)] == [[0, 1, 1], [0, 0, 1]]
    assert tables.write([(0, 1, 2), (0, 1, 2)], mark)
    gpu.queues.finish()
    assert tables.of_layer(1).cpu().tolist() == [0, 1, 2]


def test_a_change_that_could_not_be_written_is_written_later(gpu: StandInGpu) -> None:
    case = Case(open_cold([LARGE]))
    case.run(1.0)
    (group,) = case.tables.groups
    refused: list[int] = []
    write = group.tables.write

    def refuse(tables: Sequence[Sequence[int]], mark: Callable[[], Mark]) -> bool:
        refused.append(1)
        return False

    group.tables.write = refuse  # type: ignore[method-assign]
    case.cpu = 1e9
    case.run(1.0)
    assert len(refused) > 2
    assert case.table(0)[1] == 0
    group.tables.write = write  # type: ignore[method-assign]
    case.run(2 * READ_EVERY_S)
    assert case.table(0)[1] == 1


def test_a_large_change_is_logged_but_not_each_of_many(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(open_cold([LARGE]))
    with caplog.at_level(logging.INFO, "headroom.experts.shares"):
        case.run(1.0)
        assert caplog.messages == []
        case.cpu = 1e9
        case.run(1.0)
        (line,) = caplog.messages
        assert "the CPU computes 0 % of the cold experts of decode steps now, 100 % before" in line
        case.cpu = SPEEDS.cpu
        case.run(LOGGED_EVERY_S - 1.5)
        assert len(caplog.messages) == 1
        case.run(20.0)
    assert len(caplog.messages) == 2
