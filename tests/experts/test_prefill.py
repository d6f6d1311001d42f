"""Cold experts that stream through buffers give the same bits as hot ones."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.experts import prefill
from headroom.experts.prefill import ColdStream, StreamedLayer, count_picks, cut_loads
from headroom.experts.store import runs
from headroom.kernels.cuda import experts_prefill, experts_scratch, grouped, matmul, scratch
from headroom.kernels.cuda.experts import Others
from headroom.kernels.cuda.experts_prefill import many_rows
from headroom.kernels.native.module import MODULE
from headroom.plan import cost_model
from headroom.plan.cost_model import ColdSpeeds
from headroom.plan.experts import BUFFERS, buffer_bytes
from tests.experts.cold_layer import LateCopies, Layer, make_blobs, split_layer
from tests.gpu.check_experts import wanted_sum
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.kernels import compile_few_blocks, product, use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
EXPERTS, WIDTH, HIDDEN, ROWS, USED = 10, 32, 64, 34, 2
COLD = {0: (), 30: (1, 4, 9), 70: (0, 2, 3, 4, 6, 7, 9), 100: tuple(range(10))}
FAST_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=1e12, handover_s=1e-5, copy=1e3, cpu_flops=1e15)
NO_CPU = ColdSpeeds(gpu=4e12, link=48e9, cpu=0.0, handover_s=1e-5, copy=1e10, cpu_flops=0.0)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_few_blocks)
    # Hot experts are unpacked as cold ones are.
    monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
    monkeypatch.setattr(grouped, "product_way", lambda device: "loop")
    monkeypatch.setattr(torch, "mm", product)


@pytest.fixture(scope="module")
def layer_of() -> object:
    torch.manual_seed(1)
    return make_blobs(EXPERTS, WIDTH, HIDDEN)


@pytest.fixture
def inputs() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], Others]:
    ids = torch.stack([torch.randperm(EXPERTS)[:USED] for _ in range(ROWS)]).int()
    ids[torch.rand(ids.shape) < 0.1] = -1
    others = Others(torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN), torch.randn(ROWS, 1))
    return torch.randn(ROWS, HIDDEN).bfloat16(), (ids, torch.rand(ROWS, USED)), others


def open_stream(
    layers: Sequence[Layer], each: int, speeds: ColdSpeeds = NO_CPU
) -> tuple[ColdStream, list[StreamedLayer], LateCopies]:
    """Buffers of `each` experts."""
    size = layers[0].expert_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headroom.plan.experts.BUFFER_BYTES", each * size)
        staging = torch.zeros(
            BUFFERS * buffer_bytes(size, EXPERTS) + 2 * EXPERTS * WIDTH * HIDDEN, dtype=torch.uint8
        )
        queue = LateCopies()
        stream = ColdStream(staging, size, EXPERTS, queue, speeds)  # type: ignore[arg-type]
    return stream, [stream.add(layer.tiles, layer, "silu", 1.0) for layer in layers], queue


def copied(layer: Layer, queue: LateCopies) -> list[int]:
    """The rows of cold memory that were copied, in order."""
    first, size, rows = layer.cold.data_ptr(), layer.expert_bytes, []
    for source in queue.sources:
        begin = (source.data_ptr() - first) // size
        if 0 <= begin < len(layer.cold):
            rows += range(begin, begin + source.numel() // size)
    return rows


def all_hot(layer_of, inputs) -> torch.Tensor:  # type: ignore[no-untyped-def]
    x, chosen, others = inputs
    return many_rows(x, *chosen, split_layer(*layer_of, ()).tiles, "silu", others)


def never_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: 0)


@pytest.mark.parametrize("cold", sorted(COLD))
@pytest.mark.parametrize(("group", "each"), [(10, 3), (4, 1), (3, 8)])
def test_streamed_experts_give_the_bits_of_hot_ones(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs, cold: int, group: int, each: int
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: group)
    never_count(monkeypatch)
    layer = split_layer(*layer_of, COLD[cold])
    stream, (streamed,), queue = open_stream([layer], each)
    x, chosen, others = inputs
    found = streamed.many_rows(x, chosen, others)
    assert torch.equal(found, all_hot(layer_of, inputs))
    assert sorted(copied(layer, queue)) == list(range(len(COLD[cold])))  # each once
    assert stream.counts.streamed_bytes == layer.cold.nbytes


def test_streamed_experts_give_the_bits_of_hot_ones_in_f16(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: 4)
    never_count(monkeypatch)
    _, (streamed,), _ = open_stream([split_layer(*layer_of, COLD[70])], 3)
    wide, chosen, _ = inputs
    x = matmul.narrow_rows(wide.float(), torch.float16)
    found = streamed.many_rows(x, chosen)
    hot = many_rows(x, *chosen, split_layer(*layer_of, ()).tiles, "silu")
    assert torch.equal(found, hot)
    wanted = wanted_sum((wide.float(), *chosen), layer_of[0], "silu")
    assert float((found - wanted).norm() / wanted.norm()) < 0.002


def test_the_hot_sum_is_the_references(layer_of, inputs) -> None:  # type: ignore[no-untyped-def]
    x, chosen, _ = inputs
    wanted = wanted_sum((x.float(), *chosen), layer_of[0], "silu")
    found = many_rows(x, *chosen, split_layer(*layer_of, ()).tiles, "silu")
    assert float((found - wanted).norm() / wanted.norm()) < 0.015


def test_the_next_layers_first_experts_come_while_a_layer_works(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layers = [split_layer(*layer_of, COLD[70]), split_layer(*layer_of, COLD[30])]
    _, (first, second), queue = open_stream(layers, 1)
    x, chosen, others = inputs
    wanted = all_hot(layer_of, inputs)
    for _ in range(2):  # steps
        queue.sources.clear()
        assert torch.equal(first.many_rows(x, chosen, others), wanted)
        assert copied(layers[1], queue) == [0, 1]  # both buffers hold what comes next
        assert torch.equal(second.many_rows(x, chosen, others), wanted)
        assert copied(layers[0], queue) == list(range(7))
        assert copied(layers[1], queue) == [0, 1, 2]


def test_what_was_fetched_ahead_is_forgotten_where_a_step_ended_early(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layers = [split_layer(*layer_of, COLD[30]), split_layer(*layer_of, COLD[70])]
    _, (first, second), _ = open_stream(layers, 2)
    x, chosen, others = inputs
    wanted = all_hot(layer_of, inputs)
    first.many_rows(x, chosen, others)
    assert torch.equal(first.many_rows(x, chosen, others), wanted)
    assert torch.equal(second.many_rows(x, chosen, others), wanted)


def test_experts_that_changed_places_are_found_where_they_are(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layer, swapped = (split_layer(*layer_of, order) for order in ((1, 4, 9), (9, 4, 2)))
    _, (streamed,), _ = open_stream([layer], 2)
    x, chosen, others = inputs
    wanted = all_hot(layer_of, inputs)
    streamed.many_rows(x, chosen, others)
    # In place, as an exchange of experts does it; rows of cold memory are in no order then.
    layer.cold.copy_(swapped.cold)
    layer.tiles.memory[0].copy_(swapped.tiles.memory[0])
    apart = layer.tiles.memory[0].data_ptr() - swapped.tiles.memory[0].data_ptr()
    moved = swapped.tiles.addresses + apart
    layer.tiles.addresses.copy_(torch.where(swapped.tiles.addresses == 0, 0, moved))
    apart = layer.cold.data_ptr() - swapped.cold.data_ptr()
    there = swapped.host_addresses
    layer.host_addresses.copy_(torch.where(there == 0, 0, there + apart))
    assert torch.equal(streamed.many_rows(x, chosen, others), wanted)


def test_an_expert_whose_exchange_failed_comes_from_the_spare_buffer(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layer = split_layer(*layer_of, (1, 4, 9))
    layer.spare = layer.cold[1].clone()
    layer.host_addresses[4] += layer.spare.data_ptr() - layer.cold[1].data_ptr()
    layer.cold[1] = 255
    _, (streamed,), _ = open_stream([layer], 2)
    x, chosen, others = inputs
    assert torch.equal(streamed.many_rows(x, chosen, others), all_hot(layer_of, inputs))


@pytest.mark.parametrize("group", [10, 4])
def test_small_steps_copy_only_experts_that_were_chosen(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs, group: int
) -> None:
    monkeypatch.setattr(experts_prefill, "experts_at_once", lambda *sizes: group)
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: ROWS)
    x, (ids, weights), others = inputs
    ids = torch.where((ids == 4) | (ids == 7), -1, ids)
    layer = split_layer(*layer_of, COLD[70])
    stream, (streamed,), queue = open_stream([layer], 2)
    found = streamed.many_rows(x, (ids, weights), others)
    hot = split_layer(*layer_of, ()).tiles
    assert torch.equal(found, many_rows(x, ids, weights, hot, "silu", others))
    assert sorted(copied(layer, queue)) == [0, 1, 2, 4, 6]  # 4 and 7 lie in rows 3 and 5
    counts = stream.counts
    assert (counts.streamed_bytes, counts.cpu_bytes) == (5 * layer.expert_bytes, 0)
    assert counts.cpu_s == 0


@pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")
@pytest.mark.parametrize(
    "speeds",
    [FAST_CPU, ColdSpeeds(gpu=4e12, link=48e9, cpu=2e6, handover_s=1e-5, copy=1e6, cpu_flops=1e8)],
)
def test_experts_with_few_picks_may_be_left_to_the_cpu(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs, speeds: ColdSpeeds
) -> None:
    monkeypatch.setattr(cost_model, "PREFILL_HANDOVER_S", 0.0)
    layer = split_layer(*layer_of, COLD[70])
    stream, (streamed,), queue = open_stream([layer], 2, speeds)
    x, chosen, others = inputs
    found = streamed.many_rows(x, chosen, others)
    counts = stream.counts
    left, streamed_ones = (
        size // layer.expert_bytes for size in (counts.cpu_bytes, counts.streamed_bytes)
    )
    assert left + streamed_ones == 7
    assert len(copied(layer, queue)) == streamed_ones
    assert left == 7 if speeds is FAST_CPU else 0 < left < 7
    assert counts.cpu_s > 0
    wanted = all_hot(layer_of, inputs)
    routed = many_rows(x, *chosen, split_layer(*layer_of, ()).tiles, "silu")
    assert float((found - wanted).norm() / routed.norm()) < 0.01  # bf16 on one side


@pytest.mark.parametrize("counted", [False, True])
def test_nothing_on_the_gpu_meets_host_memory_but_by_copies(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs, counted: bool
) -> None:
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: ROWS * counted)
    monkeypatch.setattr(cost_model, "PREFILL_HANDOVER_S", 0.0)
    layer = split_layer(*layer_of, COLD[70])
    wanted = all_hot(layer_of, inputs)
    x, (ids, weights), others = inputs
    with stand_in_gpu(monkeypatch):
        tiles = replace(layer.tiles, addresses=layer.tiles.addresses.to("cuda"))
        staging = torch.zeros(200_000, dtype=torch.uint8, device="cuda")
        stream = prefill.open_stream(
            staging, layer.expert_bytes, EXPERTS, pinned=False, speeds=FAST_CPU
        )
        streamed = stream.add(tiles, layer, "silu", 1.0)
        parts = (others.residual, others.shared, others.shared_logits)
        moved = Others(*(part.to("cuda") for part in parts))
        chosen = ids.to("cuda"), weights.to("cuda")
        found = streamed.many_rows(x.to("cuda"), chosen, moved).cpu()
        assert stream.waits is not None
        waited = stream.waits.seconds()  # the stand-in's events say a millisecond for each
    assert (waited > 0) == (stream.counts.streamed_bytes > 0)
    if counted and MODULE is not None:
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05 * float(wanted.std()))
    else:
        assert torch.equal(found, wanted)


def test_more_downs_than_planned_are_the_scratchs(  # type: ignore[no-untyped-def]
    monkeypatch, layer_of, inputs
) -> None:
    never_count(monkeypatch)
    layer = split_layer(*layer_of, COLD[30])
    stream, (streamed,), _ = open_stream([layer], 2)
    stream.downs = stream.downs[:256]
    arena = scratch.Arena(torch.empty(1 << 20, dtype=torch.uint8))
    x, chosen, others = inputs
    with scratch.opened(arena):
        found = streamed.many_rows(x, chosen, others)
    assert torch.equal(found, all_hot(layer_of, inputs))


def test_picks_are_counted_and_those_of_nobody_are_not() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    assert count_picks(ids, 5) == [2, 0, 2, 1, 0]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_that_are_no_experts_change_nobodys_count(kind: torch.dtype) -> None:
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
