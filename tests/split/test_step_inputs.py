"""What a step on a device reads: positions, pages, masks of draft trees and padding."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from headroom.errors import KernelError
from headroom.experts.stats import RoutingStats
from headroom.kernels.cuda.delta_net import blocks_for
from headroom.layers.batch import Batch, Span
from headroom.split.gpu_stage import BUCKETS, bucket_of
from headroom.split.step_inputs import StepInputs, StepKind, kind_of
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.stage import NotedStage, TableModel, settings

TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """Let this machine have the stand-in GPU."""
    with stand_in_gpu(monkeypatch) as made:
        yield made


def make(spans: list[Span], positions: list[int] | None = None) -> Batch:
    rows = sum(span.rows for span in spans)
    return Batch(
        tokens=torch.arange(rows) + 10,
        positions=torch.tensor(positions or list(range(rows))),
        kv_slots=torch.arange(rows) + 100,
        spans=tuple(spans),
        output_rows=torch.tensor([rows - 1]),
    )


def pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_rows_know_their_sequence_their_place_and_their_pages() -> None:
    inputs = StepInputs(8, 4, 3, "cpu", torch.arange(32) + 1000)
    batch = make(
        [Span(0, 2, 5, pages(7, 2), state_slot=3), Span(2, 1, 64, pages(4, 9), state_slot=1)]
    )
    inputs.fill(batch)
    tables = inputs.batch((), frozenset(), StepKind(4, 2, 512, 64), 4).tables[0]
    assert tables.sequence.tolist() == [0, 0, 1, -1]
    assert tables.index[:3].tolist() == [5, 6, 64]
    assert tables.starts[:2].tolist() == [5, 64]
    assert tables.state_slots[:2].tolist() == [3, 1]
    assert tables.pages[:2, :2].tolist() == [[7, 2], [4, 9]]
    assert tables.kv_slots[:3].tolist() == [100, 101, 102]
    assert tables.trees is None
    assert tables.positions.dtype == tables.pages.dtype == torch.int32


def test_a_shorter_step_leaves_padding_and_new_pages_replace_old_ones() -> None:
    inputs = StepInputs(8, 4, 3, "cpu", torch.arange(32) + 1000)
    inputs.fill(make([Span(0, 4, 0, pages(1))]))
    inputs.fill(make([Span(0, 1, 64, pages(5, 6))]))
    tables = inputs.batch((), frozenset(), StepKind(4, 1, 512, 64), 4).tables[0]
    assert tables.sequence.tolist() == [0, -1, -1, -1]
    assert tables.pages[0, :2].tolist() == [5, 6]
    inputs.clear()
    assert tables.sequence.tolist() == [-1] * 4


def test_a_draft_tree_reaches_the_kernels_as_bits() -> None:
    inputs = StepInputs(8, 4, 3, "cpu", torch.arange(32) + 1000)
    spans = [Span(0, 3, 9, pages(1), tree=TREE), Span(3, 2, 4, pages(2), state_slot=1)]
    batch = make(spans, [9, 10, 10, 4, 5])
    inputs.fill(batch)
    kind = kind_of(batch, 8, 512, 64)
    assert (kind.tree, kind.span_rows) == (True, 8)
    tables = inputs.batch((), frozenset({2}), kind, 4).tables
    assert tables[0].trees is not None
    assert tables[0].trees[:5].tolist() == [0b001, 0b011, 0b101, 0b01, 0b11]
    assert tables[2].trees is tables[0].trees
    assert tables[0].positions[:5].tolist() == [9, 10, 10, 4, 5]


def test_a_token_that_the_host_does_not_know_yet_is_taken_from_the_last_step() -> None:
    inputs = StepInputs(8, 4, 3, "cpu", torch.arange(32) + 1000)
    batch = replace(make([Span(0, 3, 5, pages(7))]), tokens=torch.tensor([4, -1, -6]))
    inputs.fill(batch)
    read = inputs.batch((), frozenset(), StepKind(4, 4, 512, 64), 4)
    assert read.tokens.tolist() == [4, 1000, 1005, 0]


def test_padding_for_a_capture_reads_no_token_that_stood_for_another() -> None:
    inputs = StepInputs(8, 4, 3, "cpu", torch.arange(32) + 1000)
    inputs.fill(replace(make([Span(0, 3, 5, pages(7))]), tokens=torch.tensor([4, -1, -6])))
    inputs.clear()
    step = inputs.batch((), frozenset(), StepKind(8, 1, 128, 64), 4)
    assert step.tokens.tolist() == [0] * 8  # negative ones would be read before the table's first
    assert step.tables[0].sequence.tolist() == [-1] * 8


def test_window_layers_number_their_pages_in_rings() -> None:
    inputs = StepInputs(4, 2, 6, "cpu", torch.arange(32) + 1000)
    inputs.fill(make([Span(0, 1, 200, pages(1, 2, 3, 9), state_slot=1)]))
    ring = inputs.batch((), frozenset({3}), StepKind(1, 1, 384, 64), 1).tables[3]
    assert ring.pages[0].tolist() == [3, 4, 5, 3, 4, 5]
    assert ring.kv_slots.tolist() == [(3 + 200 // 64 % 3) * 64 + 200 % 64]


def test_a_tree_in_a_long_step_is_refused() -> None:
    batch = make([Span(0, 3, 0, pages(1), tree=TREE), Span(3, 40, 0, pages(2))])
    with pytest.raises(
        KernelError, match=r"A step with a draft tree has 43 rows\. Such a step may have at most 32"
    ):
        kind_of(batch, 43, 512, 64)


@pytest.mark.parametrize("parallel", [1, 4])
def test_every_sort_of_few_rows_that_requests_may_ask_for_has_run_before_one_waits(
    parallel: int,
) -> None:
    model = TableModel()
    stage = NotedStage(model, settings(parallel=parallel))
    stage.capture()
    captured = {(kind.rows, kind.span_rows) for kind in stage.kinds}
    assert captured == {(size, 1) for size in (1, 2, 4) if size <= parallel} | {(32, 32)}
    ran = {(len(batch.tokens), batch.span_rows) for batch in model.seen}
    for rows in range(2, 33):
        kind = kind_of(make([Span(0, rows, 0, pages(1))]), bucket_of(rows), 512, 64)
        assert (kind.rows, kind.span_rows) in ran


@pytest.mark.parametrize("parallel", [1, 3, 8, 20, 40])
def test_steps_that_are_not_captured_have_run_in_every_size_that_has_kernels(parallel: int) -> None:
    model = TableModel(capturable=False)
    NotedStage(model, settings(parallel=parallel)).capture()
    ran = [[span.rows for span in batch.spans] for batch in model.seen]
    assert [[rows] for rows in (2, 4, 8, 16, 24, 32, 33)] == [x for x in ran if x[0] > 1][:7]
    most = min(parallel, 32)
    smaller = [count for count in (1, 2, 4, 8, 16, 24) if count < most]
    assert [len(x) for x in ran if max(x) == 1] == [*smaller, most]


def test_a_small_chunk_bounds_what_runs_before_requests() -> None:
    model = TableModel(capturable=False)
    NotedStage(model, settings(parallel=2, chunk=7)).capture()
    assert [len(batch.tokens) for batch in model.seen] == [1, 2, 2, 4, 8, 9]


class Counting(TableModel):
    """Counts a choice for every row."""

    def __init__(self, capturable: bool) -> None:
        super().__init__(capturable)
        self.routing = RoutingStats(1, 2, "cpu")

    def run(self, batch: Batch) -> torch.Tensor:
        self.routing.of_layer(0).decode[1] += len(batch.tokens)
        return super().run(batch)


@pytest.mark.parametrize("capturable", [True, False])
def test_choices_of_runs_before_requests_are_forgotten(capturable: bool) -> None:
    model = Counting(capturable)
    NotedStage(model, settings(parallel=2)).capture()
    assert model.seen
    assert not model.routing.counts().any()


def run_at_start(parallel: int) -> TableModel:
    model = TableModel()
    NotedStage(model, settings(parallel=parallel)).capture()
    return model


@pytest.mark.parametrize("parallel", [1, 2, 3, 8, 32, 64])
def test_long_steps_of_one_sequence_and_of_many_have_run_before_a_request_waits(
    parallel: int,
) -> None:
    long = [batch for batch in run_at_start(parallel).seen if len(batch.tokens) > 32]
    assert {len(batch.tokens) for batch in long} == {33}
    shared = {len(batch.spans) for batch in long}
    assert shared == {1, min(parallel, 32)}
    for heads, processors in product((4, 16, 32, 48, 64), (28, 46, 108, 128, 132, 170)):
        for room in (64 << 10, 99 << 10, 163 << 10, 227 << 10):
            reached, run = (
                {blocks_for(heads * count, processors, room) for count in counts}
                for counts in (range(1, parallel + 1), shared)
            )
            assert reached == run  # the widths of gated linear attention


def test_logits_of_every_number_of_sequences_that_has_kernels_are_drawn_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    logits = TableModel.logits
    monkeypatch.setattr(
        TableModel, "logits", lambda self, x: (drawn.append(len(x)), logits(self, x))[1]
    )
    run_at_start(parallel=20)
    assert {1, 2, 4, 8, 16, 20, 32} == set(drawn)


def test_steps_with_a_tree_are_captured_when_one_is_asked_for_and_then_kept() -> None:
    model = TableModel()
    stage = NotedStage(model, settings())
    batch = make([Span(0, 3, 9, pages(1), tree=TREE)], [9, 10, 10])
    with torch.inference_mode():
        first = stage.step(batch).logits([0])
        again = stage.step(batch).logits([0])
    assert [kind.tree for kind in stage.kinds] == [True]
    assert model.seen[-1].tables[0].trees is not None
    assert torch.equal(again, first)
    assert len(stage.kinds) == 1
    assert torch.equal(first, model.logits(model.run(batch)[2:]).cpu())


def test_steps_that_decode_or_check_chains_are_captured_once_for_all_requests() -> None:
    model = TableModel()
    stage = NotedStage(model, settings())
    stage.capture()
    with torch.inference_mode():
        for turn in range(6):  # other pages and lengths each time, as other requests have
            for count in (1, 2, 3, 4):
                spans = [Span(n, 1, 9 * turn + n, pages(n + turn)) for n in range(count)]
                stage.step(make(spans, [span.start for span in spans]))
            for rows in (2, 3, 8, 13, 32):
                start = 7 * turn
                span = Span(0, rows, start, pages(turn))
                found = stage.step(make([span], [*range(start, start + rows)])).logits([0])
    sizes = Counter((kind.rows, kind.span_rows) for kind in stage.kinds)
    decoding, chains = {(size, 1) for size in (1, 2, 4)}, {(size, size) for size in BUCKETS[1:]}
    assert sizes == dict.fromkeys(decoding | chains, 1)
    wanted = model.logits(model.run(make([span], [*range(35, 67)]))[-1:])
    assert torch.equal(found, wanted.cpu())
    stage.forget_captures()  # called by code that changes what a step does
    with torch.inference_mode():
        stage.step(make([span], [*range(35, 67)]))
    assert Counter((kind.rows, kind.span_rows) for kind in stage.kinds) == sizes | {(32, 32): 2}
