"""Cold experts computed by the CPU while the GPU runs: real kernels on the CPU, a real worker."""

import threading
from collections.abc import Iterator

import pytest
import torch

from headroom.errors import DeviceError
from headroom.experts.cache import RULES, distinct_picks
from headroom.experts.copies import HostCopies
from headroom.experts.decode import DecodeResolver, DecodeWorker
from headroom.experts.shares import LinkTables
from headroom.kernels.cuda import expert_cache, experts, handover, matmul
from headroom.kernels.cuda.expert_cache import CpuRequest
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.cuda.handover import COUNTS, Mailbox
from headroom.kernels.cuda.sizes import TILED
from headroom.kernels.native import experts as native_experts
from headroom.kernels.native.experts import PanelTable
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from tests.experts.cold_layers import DecodeStore, decode_store, random_picks
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(
    MODULE is None or COMPILER is None, reason="needs the C++ module and a C++ compiler"
)
EXPERTS, USED, WIDTH, HIDDEN = 10, 4, 256, 256
SIZES = (EXPERTS, WIDTH, HIDDEN)
BY_CPU, MIXED = (0,) * (USED + 1), (0, 0, 1, 1, 2)  # of n cold picks, those that the GPU reads
MIX = ("q4_k", "q4_k", "q6_k")
NO_EXPERT_HOT = torch.zeros(EXPERTS, dtype=torch.int32)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)
    monkeypatch.setattr(experts, "shared_bytes_of", lambda device: 64 << 10)


@pytest.fixture
def made() -> Iterator[list[DecodeWorker]]:
    """What a test made, ended after it."""
    started: list[DecodeWorker] = []
    yield started
    for one in started:
        one.close()


def started(
    made: list[DecodeWorker], stores: list[DecodeStore], link: tuple[int, ...]
) -> list[DecodeResolver]:
    """The parts of layers whose worker runs."""
    compute = DecodeWorker("cpu")
    made.append(compute)
    table = torch.tensor(link, dtype=torch.int32)
    parts = [
        DecodeResolver(store.lookup, compute.add(store, USED, "silu", table)) for store in stores
    ]
    compute.start()
    return parts


def all_hot(store: DecodeStore, x: torch.Tensor, picks: Picks) -> torch.Tensor:
    """What a GPU says that holds every expert, but for its rounding: its kernels are slow here."""
    shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    table = PanelTable(store.tiles.addresses, store.kinds, shapes, store.blobs, tiles=True)
    return x + native_experts.experts(x, *picks, table, "silu", "int24")


def run_layer(
    part: DecodeResolver,
    store: DecodeStore,
    x: torch.Tensor,
    picks: Picks,
) -> torch.Tensor:
    """A layer as a step runs it, on copies of its inputs."""
    picks = Picks(*(tensor.clone() for tensor in picks))
    picks = part.resolve(x, picks)
    out = all_hot(store, x, picks)
    part.add_answers(out)
    return out


def apart(found: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> float:
    """The distance of answers as a share of their size, the residual taken off."""
    return float((found - wanted).norm() / (wanted - x).norm().clamp(min=1e-9))


@pytest.mark.parametrize("link", [BY_CPU, MIXED], ids=["cpu", "mixed"])
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("hot", [0, 3, 6, 10])
def test_any_split_of_hot_and_cold_experts_computes_what_all_hot_computes(
    made: list[DecodeWorker], hot: int, rows: int, link: tuple[int, ...]
) -> None:
    store = decode_store(MIX, SIZES, range(hot))
    (part,) = started(made, [store], link)
    x, picks = torch.randn(rows, HIDDEN) * 0.3, random_picks(rows, EXPERTS, USED)
    made[0].begin_step()
    found = run_layer(part, store, x, picks)
    assert apart(found, all_hot(store, x, picks), x) < 1e-5
    counts = made[0].counts()
    cold = [expert for expert in distinct_picks(picks.ids.tolist()) if expert >= hot]
    over_link = cold[: link[min(len(cold), len(link) - 1)]]
    # Both sides read an expert of several rows once.
    assert counts.gpu_bytes == len(over_link) * store.expert_bytes
    assert counts.cpu_bytes == (len(cold) - len(over_link)) * store.expert_bytes
    assert (counts.linked, counts.by_cpu) == (len(over_link), len(cold) - len(over_link))
    made[0].check()


def test_tables_that_change_between_steps_move_work_and_no_result(
    made: list[DecodeWorker],
) -> None:
    stores, worker = [decode_store(MIX, SIZES, range(3)) for _ in range(2)], DecodeWorker("cpu")
    made.append(worker)
    tables = LinkTables(2, (0,) * (EXPERTS + 1), torch.device("cpu"))
    parts = [
        DecodeResolver(store.lookup, worker.add(store, USED, "silu", tables.of_layer(layer)))
        for layer, store in enumerate(stores)
    ]
    worker.start()
    x, picks = torch.randn(2, HIDDEN) * 0.3, random_picks(2, EXPERTS, USED)
    misses = len(set(picks.ids.flatten().tolist()) - {0, 1, 2})
    for kept in (0, 1, misses, 2, 0):
        before = [one.experts for one in worker.layer_counts()]
        # The second layer probes: it leaves the CPU one more.
        each = [tuple(min(n, kept - (kept > 0) * layer) for n in range(EXPERTS + 1))
                for layer in (0, 1)]  # fmt: skip
        assert tables.write(each, HostCopies().mark)
        worker.begin_step()
        for part, store in zip(parts, stores, strict=True):
            found = run_layer(part, store, x, picks)
            assert apart(found, all_hot(store, x, picks), x) < 1e-5
        asked = [one.experts for one in worker.layer_counts()]
        done = [after - old for after, old in zip(asked, before, strict=True)]
        assert done == [misses - table[misses] for table in each]
    assert worker.steps == 5
    worker.check()


@pytest.mark.parametrize("name", sorted(kind.name for kind in TILED))
def test_every_type_is_taken(made: list[DecodeWorker], name: str) -> None:
    store = decode_store((name, name, "q8_0"), SIZES, range(0, 10, 2))
    (part,) = started(made, [store], BY_CPU)
    x, picks = torch.randn(2, HIDDEN) * 0.3, random_picks(2, EXPERTS, USED)
    made[0].begin_step()
    assert apart(run_layer(part, store, x, picks), all_hot(store, x, picks), x) < 1e-5


def test_the_kernels_of_a_gpu_pass_over_what_the_cpu_takes(made: list[DecodeWorker]) -> None:
    store = decode_store(("q8_0",) * 3, (4, 64, HIDDEN), [1, 2])
    (part,) = started(made, [store], BY_CPU)
    x, ids = torch.randn(1, HIDDEN) * 0.3, torch.tensor([[3, 1, 0, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    addends = Addends(residual=x)
    rows = matmul.half_rows(x)
    wanted = experts.few_rows(rows, ids.clone(), weights, store.tiles, "silu", addends)
    made[0].begin_step()
    part.resolve(x, Picks(ids, weights))
    assert ids.tolist() == [[-1, 1, -1, 2]]
    found = experts.few_rows(rows, ids, weights, store.tiles, "silu", addends)
    part.add_answers(found)
    assert apart(found, wanted, x) < 2e-3


def test_layers_and_steps_take_turns_in_one_mailbox(made: list[DecodeWorker]) -> None:
    stores = [decode_store(MIX, SIZES, hot) for hot in (range(5), range(10), range(5, 9))]
    parts = started(made, stores, BY_CPU)
    for step in range(6):
        made[0].begin_step()
        for part, store in zip(parts, stores, strict=True):
            x, picks = torch.randn(1 + step, HIDDEN) * 0.3, random_picks(1 + step, EXPERTS, USED)
            assert apart(run_layer(part, store, x, picks), all_hot(store, x, picks), x) < 1e-5
    assert made[0].box.words[96] == 6  # steps that the worker was told have ended


def test_a_rows_result_does_not_depend_on_other_rows(made: list[DecodeWorker]) -> None:
    store = decode_store(MIX, SIZES, range(5))
    # Where GPU and CPU share the experts of a step, other rows decide which of them are whose.
    (part,) = started(made, [store], BY_CPU)
    x, picks = torch.randn(8, HIDDEN) * 0.3, random_picks(8, EXPERTS, USED)
    made[0].begin_step()
    together = run_layer(part, store, x, picks)
    for row in range(8):
        made[0].begin_step()
        one = slice(row, row + 1)
        alone = run_layer(part, store, x[one], Picks(picks.ids[one], picks.weights[one]))
        assert torch.equal(alone, together[one])


def test_experts_that_were_exchanged_are_found_where_they_are(made: list[DecodeWorker]) -> None:
    store = decode_store(MIX, SIZES, range(5))
    (part,) = started(made, [store], BY_CPU)
    x, picks = torch.randn(4, HIDDEN) * 0.3, random_picks(4, EXPERTS, USED)
    for turn in range(3):
        made[0].begin_step()
        assert apart(run_layer(part, store, x, picks), all_hot(store, x, picks), x) < 1e-5
        store.is_hot[turn], store.is_hot[9 - turn] = 0, 1
        store.host_addresses[turn] = store.tiles.addresses[turn]
        store.host_addresses[9 - turn] = 0


def test_a_gpu_gives_up_a_cpu_that_does_not_answer() -> None:
    box = Mailbox.allocate(HIDDEN, 1, "cpu")
    table = expert_cache.static_table(NO_EXPERT_HOT, torch.zeros(USED + 1).int())
    x, picks = torch.randn(2, HIDDEN), random_picks(2, EXPERTS, USED)
    out = torch.zeros(2, HIDDEN)
    expert_cache.resolve(picks, table, RULES, CpuRequest(x, box, 0))
    assert not box.failed
    handover.collect(out, box, 0, last=True, limit_ms=20)
    assert box.failed
    assert not out.any()
    expert_cache.resolve(picks, table, RULES, CpuRequest(x, box, 0))
    handover.collect(out, box, 0, last=True, limit_ms=600_000)  # does not wait again


def test_the_delay_of_late_answers_is_counted_without_the_cpus_own_time() -> None:
    box = Mailbox.allocate(HIDDEN, 1, "cpu")
    table = expert_cache.static_table(NO_EXPERT_HOT, torch.zeros(USED + 1).int())
    x, picks, out = torch.randn(1, HIDDEN), random_picks(1, EXPERTS, USED), torch.zeros(1, HIDDEN)
    picks.ids[:] = torch.arange(USED)
    answer = handover.WORDS["ANSWER"]

    def give_answer() -> None:
        box.words[answer + 1] = 40_000_000  # ns
        box.words[answer] = 2

    expert_cache.resolve(picks, table, RULES, CpuRequest(x, box, 0))
    box.words[answer] = 1  # this answer is there in time
    handover.collect(out, box, 0, last=True)
    first = dict(zip(COUNTS, box.counts[0].tolist(), strict=True))
    assert (first["lates"], first["late_ns"]) == (0, 0)
    picks.ids[:] = torch.arange(USED)
    expert_cache.resolve(picks, table, RULES, CpuRequest(x, box, 0))
    late = threading.Timer(0.1, give_answer)
    late.start()
    handover.collect(out, box, 0, last=True)
    late.join()
    second = dict(zip(COUNTS, box.counts[0].tolist(), strict=True))
    assert second["lates"] == 1
    whole_ns = second["hot_ns"] + second["wait_ns"] - first["hot_ns"] - first["wait_ns"]
    assert 40_000_000 < second["late_ns"] == whole_ns - 40_000_000


def test_a_gpu_that_gave_up_is_reported(made: list[DecodeWorker]) -> None:
    started(made, [decode_store(MIX, SIZES, range(5))], BY_CPU)
    made[0].check()
    made[0].box.words[handover.WORDS["FAILED"]] = 1  # as its kernel says it
    with pytest.raises(DeviceError) as caught:
        made[0].check()
    assert str(caught.value) == (
        "A step on cpu failed: the CPU did not answer for cold experts within 10000 ms. Try --cold "
        "gpu, which needs no CPU threads, or fewer --threads."
    )


def test_a_failed_worker_answers_and_is_reported(made: list[DecodeWorker]) -> None:
    store = decode_store(MIX, SIZES, range(5))
    (part,) = started(made, [store], BY_CPU)
    store.host_addresses[:] = 0  # as if the tables of both sides disagreed
    x = torch.randn(1, HIDDEN)
    made[0].begin_step()
    ids = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32)
    part.resolve(x, Picks(ids, torch.ones(1, USED)))
    part.add_answers(x)
    with pytest.raises(DeviceError) as caught:
        made[0].check()
    assert str(caught.value) == (
        "A step on cpu failed: the CPU could not compute cold experts: a request for cold layer 0 "
        "picks expert 5, which is not in host memory. Try --cold gpu, which needs no CPU threads, "
        "or fewer --threads."
    )


def test_dropped_picks_give_their_weight_to_the_others() -> None:
    is_hot = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    ids = torch.tensor([[0, 1], [2, 0], [1, 3], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.5], [0.7, 0.3], [0.6, 0.4], [0.0, 0.0]])
    handover.drop(ids, weights, is_hot)
    assert ids.tolist() == [[0, -1], [2, 0], [-1, -1], [-1, -1]]
    torch.testing.assert_close(
        weights, torch.tensor([[0.75, 0.0], [0.7, 0.3], [0.0, 0.0], [0.0, 0.0]])
    )
