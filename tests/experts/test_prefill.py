"""Cold experts that stream through buffers give the same bits as hot ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.experts import prefill
from headroom.experts.prefill import ColdStream, StreamedLayer, count_picks, cut_loads
from headroom.experts.store import runs
from headroom.kernels.cuda import experts_prefill, experts_scratch, grouped, matmul, scratch
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.cuda.experts_prefill import many_rows
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from headroom.plan import cost_model
from headroom.plan.cost_model import ColdSpeeds
from headroom.plan.experts import STREAM_BUFFERS, buffer_bytes
from tests.experts.cold_layers import PrefillStore, make_blobs, prefill_store
from tests.gpu.check_experts import wanted_sum
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import StandInGpu, stand_in_gpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
EXPERTS, WIDTH, HIDDEN, ROWS, USED = 10, 32, 64, 34, 2
COLD = {0: (), 30: (1, 4, 9), 70: (0, 2, 3, 4, 6, 7, 9), 100: tuple(range(10))}
FAST_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=1e12, handover_s=1e-5, copy=1e3, cpu_flops=1e15)
NO_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=0.0, handover_s=1e-5, copy=1e10, cpu_flops=0.0)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU whose copies run only when the computing waits for them."""
    torch.manual_seed(0)
    # Hot experts are unpacked as cold ones are.
    monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
    monkeypatch.setattr(grouped, "product_way", lambda device: "loop")
    with stand_in_gpu(monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def layer_of() -> object:
    torch.manual_seed(1)
    return make_blobs(EXPERTS, WIDTH, HIDDEN)


@pytest.fixture
def inputs(gpu: StandInGpu) -> tuple[torch.Tensor, Picks, Addends]:
    ids = torch.stack([torch.randperm(EXPERTS)[:USED] for _ in range(ROWS)]).int()
    ids[torch.rand(ids.shape) < 0.1] = -1
    addends = [torch.randn(ROWS, size).to("cuda") for size in (HIDDEN, HIDDEN, 1)]
    x, weights = torch.randn(ROWS, HIDDEN).bfloat16(), torch.rand(ROWS, USED)
    return x.to("cuda"), Picks(ids.to("cuda"), weights.to("cuda")), Addends(*addends)


def open_stream(
    gpu: StandInGpu,
    layers: Sequence[PrefillStore],
    each: int,  # experts that a buffer holds
    speeds: ColdSpeeds = NO_CPU,
    pinned: bool = True,
) -> tuple[ColdStream, list[StreamedLayer]]:
    """Return a stream whose copies are the engine's own, and the layers that use it."""
    size = layers[0].expert_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headroom.plan.experts.BUFFER_BYTES", each * size)
        staging = torch.zeros(
            STREAM_BUFFERS * buffer_bytes(size, EXPERTS) + 2 * EXPERTS * WIDTH * HIDDEN,
            dtype=torch.uint8,
            device="cuda",
        )
        stream = prefill.open_stream(staging, size, EXPERTS, pinned=pinned, speeds=speeds)
    gpu.kept += [staging, stream, *layers]
    return stream, [stream.add(layer.tiles, layer, "silu", 1.0) for layer in layers]


def copied(layer: PrefillStore, gpu: StandInGpu) -> list[int]:
    """Return the rows of cold memory that were copied, in order."""
    first, size, rows = layer.cold.data_ptr(), layer.expert_bytes, []
    for copy in gpu.driver.copies:
        begin = (copy.source - first) // size
        if 0 <= begin < len(layer.cold):
            rows += range(begin, begin + copy.bytes // size)
    return rows


def all_hot(layer_of, inputs) -> torch.Tensor:  # type: ignore[no-untyped-def]
    x, chosen, addends = inputs
    return many_rows(x, *chosen, prefill_store(*layer_of, ()).tiles, "silu", addends)


def on_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.cpu() for x in tensors)


def never_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: 0)


@pytest.mark.parametrize("cold", sorted(COLD))
@pytest.mark.parametrize(("group", "each"), [(10, 3), (4, 1), (3, 8)])
def test_streamed_experts_give_the_bits_of_hot_ones(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs, cold: int, group: int, each: int
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: group)
    never_count(monkeypatch)
    layer = prefill_store(*layer_of, COLD[cold])
    stream, (streamed,) = open_stream(gpu, [layer], each)
    x, chosen, addends = inputs
    found = streamed.many_rows(x, chosen, addends)
    assert torch.equal(found, all_hot(layer_of, inputs))
    assert sorted(copied(layer, gpu)) == list(range(len(COLD[cold])))  # each once
    assert stream.counts.streamed_bytes == layer.cold.nbytes


def test_streamed_experts_give_the_bits_of_hot_ones_in_f16(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: 4)
    never_count(monkeypatch)
    _, (streamed,) = open_stream(gpu, [prefill_store(*layer_of, COLD[70])], 3)
    wide, chosen, _ = inputs
    x = matmul.narrow_rows(wide.float(), torch.float16)
    found = streamed.many_rows(x, chosen)
    hot = many_rows(x, *chosen, prefill_store(*layer_of, ()).tiles, "silu")
    assert torch.equal(found, hot)
    wanted = wanted_sum(on_host(wide.float(), *chosen), layer_of[0], "silu")
    assert float((found.cpu() - wanted).norm() / wanted.norm()) < 0.002


def test_the_hot_sum_is_the_references(layer_of, inputs) -> None:  # type: ignore[no-untyped-def]
    x, chosen, _ = inputs
    wanted = wanted_sum(on_host(x.float(), *chosen), layer_of[0], "silu")
    found = many_rows(x, *chosen, prefill_store(*layer_of, ()).tiles, "silu").cpu()
    assert float((found - wanted).norm() / wanted.norm()) < 0.015


def test_the_next_layers_first_experts_come_while_a_layer_works(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layers = [prefill_store(*layer_of, COLD[70]), prefill_store(*layer_of, COLD[30])]
    _, (first, second) = open_stream(gpu, layers, 1)
    x, chosen, addends = inputs
    wanted = all_hot(layer_of, inputs)
    for _ in range(2):  # steps
        gpu.driver.copies.clear()
        assert torch.equal(first.many_rows(x, chosen, addends), wanted)
        assert copied(layers[1], gpu) == [0, 1]  # both buffers hold what comes next
        assert torch.equal(second.many_rows(x, chosen, addends), wanted)
        assert copied(layers[0], gpu) == list(range(7))
        assert copied(layers[1], gpu) == [0, 1, 2]


def test_loads_copied_ahead_are_dropped_if_a_step_ended_early(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layers = [prefill_store(*layer_of, COLD[30]), prefill_store(*layer_of, COLD[70])]
    _, (first, second) = open_stream(gpu, layers, 2)
    x, chosen, addends = inputs
    wanted = all_hot(layer_of, inputs)
    first.many_rows(x, chosen, addends)
    assert torch.equal(first.many_rows(x, chosen, addends), wanted)
    assert torch.equal(second.many_rows(x, chosen, addends), wanted)


def test_experts_that_changed_places_are_found_where_they_are(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layer, swapped = (prefill_store(*layer_of, order) for order in ((1, 4, 9), (9, 4, 2)))
    _, (streamed,) = open_stream(gpu, [layer], 2)
    x, chosen, addends = inputs
    wanted = all_hot(layer_of, inputs)
    streamed.many_rows(x, chosen, addends)
    # In place, as an exchange of experts does it; rows of cold memory are in no order then.
    layer.cold.copy_(swapped.cold)
    layer.tiles.memory[0].copy_(swapped.tiles.memory[0])
    apart = layer.tiles.memory[0].data_ptr() - swapped.tiles.memory[0].data_ptr()
    moved = swapped.tiles.addresses + apart
    layer.tiles.addresses.copy_(torch.where(swapped.tiles.addresses == 0, 0, moved))
    apart = layer.cold.data_ptr() - swapped.cold.data_ptr()
    there = swapped.host_addresses
    layer.host_addresses.copy_(torch.where(there == 0, 0, there + apart))
    assert torch.equal(streamed.many_rows(x, chosen, addends), wanted)


def test_an_expert_whose_exchange_failed_comes_from_the_spare_buffer(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layer = prefill_store(*layer_of, (1, 4, 9))
    layer.spare = layer.cold[1].clone()
    layer.host_addresses[4] += layer.spare.data_ptr() - layer.cold[1].data_ptr()
    layer.cold[1] = 255
    _, (streamed,) = open_stream(gpu, [layer], 2)
    x, chosen, addends = inputs
    assert torch.equal(streamed.many_rows(x, chosen, addends), all_hot(layer_of, inputs))


@pytest.mark.parametrize("group", [10, 4])
def test_small_steps_copy_only_experts_that_were_chosen(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs, group: int
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: group)
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: ROWS)
    x, (ids, weights), addends = inputs
    ids = torch.where((ids == 4) | (ids == 7), -1, ids)
    layer = prefill_store(*layer_of, COLD[70])
    stream, (streamed,) = open_stream(gpu, [layer], 2)
    found = streamed.many_rows(x, Picks(ids, weights), addends)
    hot = prefill_store(*layer_of, ()).tiles
    assert torch.equal(found, many_rows(x, ids, weights, hot, "silu", addends))
    assert sorted(copied(layer, gpu)) == [0, 1, 2, 4, 6]  # 4 and 7 lie in rows 3 and 5
    counts = stream.counts
    assert (counts.streamed_bytes, counts.cpu_bytes) == (5 * layer.expert_bytes, 0)
    assert counts.cpu_s == 0


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize(
    "speeds",
    [FAST_CPU, ColdSpeeds(gpu=4e12, link=48e9, cpu=2e6, handover_s=1e-5, copy=1e6, cpu_flops=1e8)],
)
def test_experts_with_few_picks_may_be_left_to_the_cpu(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs, speeds: ColdSpeeds
) -> None:
    monkeypatch.setattr(cost_model, "PREFILL_HANDOVER_S", 0.0)
    layer = prefill_store(*layer_of, COLD[70])
    stream, (streamed,) = open_stream(gpu, [layer], 2, speeds)
    x, chosen, addends = inputs
    found = streamed.many_rows(x, chosen, addends)
    counts = stream.counts
    left, streamed_ones = (
        size // layer.expert_bytes for size in (counts.cpu_bytes, counts.streamed_bytes)
    )
    assert left + streamed_ones == 7
    assert len(copied(layer, gpu)) == streamed_ones
    assert left == 7 if speeds is FAST_CPU else 0 < left < 7
    assert counts.cpu_s > 0
    wanted = all_hot(layer_of, inputs)
    routed = many_rows(x, *chosen, prefill_store(*layer_of, ()).tiles, "silu")
    assert float((found - wanted).norm() / routed.norm()) < 0.01  # bf16 on one side


@pytest.mark.parametrize("counted", [False, True])
def test_cold_memory_that_is_not_pinned_goes_through_buffers_that_are(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs, counted: bool
) -> None:
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: ROWS * counted)
    layer = prefill_store(*layer_of, COLD[70])
    stream, (streamed,) = open_stream(gpu, [layer], 2, pinned=False)
    x, chosen, addends = inputs
    assert torch.equal(streamed.many_rows(x, chosen, addends), all_hot(layer_of, inputs))
    assert copied(layer, gpu) == []
    assert sum(copy.bytes for copy in gpu.driver.copies) == layer.cold.nbytes
    assert stream.counts.streamed_bytes == layer.cold.nbytes


def test_the_time_that_the_computing_waits_for_copies_is_measured(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    gpu.queues.stepped = True
    stream, (streamed,) = open_stream(gpu, [prefill_store(*layer_of, COLD[70])], 1)
    x, chosen, addends = inputs
    streamed.many_rows(x, chosen, addends)
    assert stream.waits is not None
    assert stream.waits.seconds() == pytest.approx(0.007)  # each copy takes a millisecond


def test_more_downs_than_planned_are_allocated_by_the_scratch(  # type: ignore[no-untyped-def]
    monkeypatch, gpu, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layer = prefill_store(*layer_of, COLD[30])
    stream, (streamed,) = open_stream(gpu, [layer], 2)
    stream.downs = stream.downs[:256]
    arena = scratch.Arena(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    x, chosen, addends = inputs
    with scratch.opened(arena):
        found = streamed.many_rows(x, chosen, addends)
    assert torch.equal(found, all_hot(layer_of, inputs))


def test_picks_are_counted_and_negative_ids_are_not() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    assert count_picks(ids, 5) == [2, 0, 2, 1, 0]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_that_are_no_experts_are_not_counted(kind: torch.dtype) -> None:
    limits = torch.iinfo(kind)
    ids = torch.tensor([[2, 0], [-1, 5], [6, limits.max], [limits.min, 2], [4, 0]], dtype=kind)
    assert count_picks(ids, 5) == [2, 0, 2, 0, 1]
    assert count_picks(ids[1:3], 5) == [0] * 5


@given(rows=st.sets(st.integers(0, 300)), most=st.integers(1, 40))
def test_loads_have_every_row_once_and_runs_are_their_neighbours(rows: set[int], most: int) -> None:
    loads = cut_loads(list(rows), most)
    assert [row for load in loads for row in load] == sorted(rows)
    assert all(0 < len(load) <= most for load in loads)
    for load in loads:
        found = runs(load)
        assert [row for first, end in found for row in range(first, end)] == load
        assert all(a[1] < b[0] for a, b in pairwise(found))
