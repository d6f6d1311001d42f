"""Cold experts computed by the CPU while the GPU runs: real kernels on the CPU, a real worker."""

from collections.abc import Iterator

import pytest
import torch

from headroom.errors import DeviceError
from headroom.experts.decode import CpuPicks, DecodeWorker
from headroom.kernels.cuda import experts, handover, matmul
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.cuda.handover import Mailbox
from headroom.kernels.cuda.sizes import TILED
from headroom.kernels.native import experts as native_experts
from headroom.kernels.native.experts import PanelTable
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from headroom.plan.cost_model import DecodeChoice
from tests.experts.cold_layers import DecodeStore, decode_store, random_picks
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(
    MODULE is None or COMPILER is None, reason="needs the C++ module and a C++ compiler"
)
EXPERTS, USED, WIDTH, HIDDEN = 10, 4, 256, 256
SIZES = (EXPERTS, WIDTH, HIDDEN)
BY_CPU = DecodeChoice("cpu", (0,) * (USED + 1))
MIXED = DecodeChoice("cpu", (0, 0, 1, 1, 2))
MIX = ("q4_k", "q4_k", "q6_k")


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
    made: list[DecodeWorker], stores: list[DecodeStore], choice: DecodeChoice
) -> list[CpuPicks]:
    """The parts of layers whose worker runs."""
    compute = DecodeWorker("cpu")
    made.append(compute)
    parts = [compute.add(store, USED, "silu", choice) for store in stores]
    compute.start()
    return parts


def all_hot(store: DecodeStore, x: torch.Tensor, picks: Picks) -> torch.Tensor:
    """What a GPU says that holds every expert, but for its rounding: its kernels are slow here."""
    shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    table = PanelTable(store.tiles.addresses, store.kinds, shapes, store.blobs, tiles=True)
    return x + native_experts.experts(x, *picks, table, "silu", "f32")


def run_layer(
    part: CpuPicks,
    store: DecodeStore,
    x: torch.Tensor,
    picks: Picks,
) -> torch.Tensor:
    """A layer as a step runs it, on copies of its inputs."""
    picks = Picks(*(tensor.clone() for tensor in picks))
    part.ask(x, *picks)
    out = all_hot(store, x, picks)
    part.add_answers(out)
    return out


def apart(found: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> float:
    """The distance of answers as a share of their size, the residual taken off."""
    return float((found - wanted).norm() / (wanted - x).norm().clamp(min=1e-9))


@pytest.mark.parametrize("choice", [BY_CPU, MIXED], ids=["cpu", "mixed"])
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize("hot", [0, 3, 6, 10])
def test_any_split_of_hot_and_cold_experts_computes_what_all_hot_computes(
    made: list[DecodeWorker], hot: int, rows: int, choice: DecodeChoice
) -> None:
    store = decode_store(MIX, SIZES, range(hot))
    (part,) = started(made, [store], choice)
    x, picks = torch.randn(rows, HIDDEN) * 0.3, random_picks(rows, EXPERTS, USED)
    made[0].begin_step()
    found = run_layer(part, store, x, picks)
    assert apart(found, all_hot(store, x, picks), x) < 1e-5
    counts = made[0].counts()
    by_row = ((picks.ids >= 0) & (picks.ids >= hot)).sum(1).tolist()  # cold ones
    read_in_place = sum(choice.in_place[cold] for cold in by_row)
    assert counts.gpu_bytes == read_in_place * store.expert_bytes
    assert (counts.cpu_bytes > 0) == (sum(by_row) > read_in_place)
    made[0].check()


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
    part.ask(x, ids, weights)
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
    (part,) = started(made, [store], MIXED)
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
    takers = handover.Takers(torch.zeros(EXPERTS, dtype=torch.int32), torch.zeros(USED + 1).int())
    x, picks = torch.randn(2, HIDDEN), random_picks(2, EXPERTS, USED)
    out = torch.zeros(2, HIDDEN)
    handover.publish(x, *picks, takers, box, 0)
    assert not box.failed
    handover.collect(out, box, 0, last=True, limit_ms=20)
    assert box.failed
    assert not out.any()
    handover.publish(x, *picks, takers, box, 0)
    handover.collect(out, box, 0, last=True, limit_ms=600_000)  # does not wait again


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
    part.ask(x, ids, torch.ones(1, USED))
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
