"""Results of a step on a CPU, by output row."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.split.stage import CpuResult, pick_rows

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
