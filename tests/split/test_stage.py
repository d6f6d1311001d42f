"""Results of a step on a CPU, by output row."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.layers.batch import Batch
from headroom.split.model import HandedRows
from headroom.split.stage import CpuResult, CpuStage, pick_rows
from headroom.split.stage_times import StageTimes

ROWS = 9
TABLE = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


@given(st.sets(st.integers(0, ROWS - 1)).map(sorted))
def test_picked_rows_are_those_named_and_neighbours_are_a_view(rows: list[int]) -> None:
    found = pick_rows(TABLE, rows)
    assert torch.equal(found, TABLE[torch.tensor(rows, dtype=torch.int64)])
    neighbours = rows == list(range(rows[0], rows[-1] + 1)) if rows else True
    shared = found.untyped_storage().data_ptr() == TABLE.untyped_storage().data_ptr()
    assert shared == neighbours


def test_a_cpu_draws_no_tokens_and_computes_logits_of_asked_rows_alone() -> None:
    asked: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        return (2 * hidden).bfloat16()

    result = CpuResult(TABLE, logits, lambda hidden: hidden.bfloat16() - 1)
    assert result.tokens() == [None] * ROWS
    assert result.token_rows == {}
    result.draw_limited({0: None})
    found = result.logits([1, 4])
    assert found.dtype == torch.float32
    assert torch.equal(found, 2 * TABLE[[1, 4]])
    assert asked == [2]
    assert torch.equal(result.normed([8]), TABLE[8:] - 1)


class PlayedModel:
    """A model whose work takes the time that a clock is advanced by."""

    tap = None
    embed_s = 0.125  # of a step

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    def receive(self, received: HandedRows) -> None:
        self._advance(0.25)

    def run(self, batch: Batch) -> torch.Tensor:
        self._advance(1.0)
        return TABLE

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.run(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._advance(2.0)
        return hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def handed(self, x: torch.Tensor, rows: int) -> HandedRows:
        return HandedRows(x[:rows])


def test_waiting_for_a_gpu_is_told_apart_from_copying_its_rows_and_from_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    gpu = SimpleNamespace(synchronize=lambda: advance(4.0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr("headroom.split.stage.time.perf_counter", lambda: now)
    stage = CpuStage("cpu", PlayedModel(advance))  # type: ignore[arg-type]
    ids = torch.zeros(2, dtype=torch.int64)
    batch = Batch(tokens=ids, positions=ids, kv_slots=ids, spans=(), output_rows=ids)
    elsewhere, here = HandedRows(torch.zeros(2, 3, device="meta")), HandedRows(torch.zeros(2, 3))
    handed = 2 * 3 * 4
    stage.run(batch, elsewhere)
    assert stage.times() == [("cpu", StageTimes(1, 1.0, 4.0, handed, 0.25, 0.125))]
    stage.receive(elsewhere)  # as the pipeline does before it launches the next step
    advance(8.0)
    stage.run(batch)
    assert stage.times() == [("cpu", StageTimes(2, 2.0, 8.0, 2 * handed, 0.5, 0.25))]
    stage.run(batch, here)  # of another CPU
    stage.run(batch)
    assert stage.times() == [("cpu", StageTimes(4, 4.0, 8.0, 4 * handed, 0.75, 0.5))]
    stage.step(batch).logits([0])
    ((_, times),) = stage.times()
    assert (times.steps, times.busy_s, times.head_s) == (5, 4.0 + 1.0 + 2.0, 2.0)
