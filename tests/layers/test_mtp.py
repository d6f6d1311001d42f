"""The hidden states that a prediction head reads: before each row, and after accepted ones."""

import pytest
import torch

from headroom.errors import CapacityError
from headroom.kernels.ops import Span
from headroom.layers.batch import Batch
from headroom.layers.guesses import Accepted
from headroom.layers.mtp import HiddenStates
from tests.plan.shapes import settings

NO_PAGES = torch.zeros(9, dtype=torch.int64)


def states(parallel: int = 3, guesses: int = 7) -> HiddenStates:
    made = HiddenStates(settings(parallel=parallel, draft_tokens=guesses), 1, "cpu")
    made.last[:, 0] = torch.tensor([100.0, 200.0, 300.0])[:parallel]
    return made


def step(*spans: Span) -> tuple[torch.Tensor, Batch]:
    """Rows with the hidden states 1, 2, 3 ..., and their batch."""
    rows = sum(span.rows for span in spans)
    numbers = torch.arange(rows)
    return 1.0 + numbers[:, None], Batch(numbers, numbers, numbers, spans, numbers)


def test_a_row_follows_the_row_before_it_the_last_token_or_nothing() -> None:
    hidden, batch = step(
        Span(0, 3, 0, NO_PAGES, 2),  # the beginning of a text
        Span(3, 1, 17, NO_PAGES, 0),
        Span(4, 2, 5, NO_PAGES, 1),
    )
    kept = states()
    assert kept.before(hidden, batch.spans)[:, 0].tolist() == [0, 1, 2, 100, 200, 5]
    kept.keep(hidden, batch)
    assert kept.last[:, 0].tolist() == [4, 6, 3]


def test_a_guess_of_a_tree_follows_its_parent() -> None:
    tree = torch.eye(5, dtype=torch.bool)
    for row, parent in ((1, 0), (2, 1), (3, 0), (4, 3)):
        tree[row] |= tree[parent]
    hidden, batch = step(Span(0, 1, 8, NO_PAGES, 0), Span(1, 5, 9, NO_PAGES, 1, tree, True))
    before = states().before(hidden, batch.spans)[:, 0].tolist()
    assert before == [100, 200, 2, 3, 2, 5]


def test_of_guessed_rows_the_last_accepted_one_stays() -> None:
    hidden, batch = step(
        Span(0, 4, 9, NO_PAGES, 1, None, True),
        Span(4, 1, 30, NO_PAGES, 0),
        Span(5, 3, 20, NO_PAGES, 2, None, True),
    )
    kept = states()
    kept.keep(hidden, batch)
    assert kept.last[:, 0].tolist() == [5, 200, 300]
    kept.commit([Accepted(batch.spans[0], (0, 1, 2)), Accepted(batch.spans[2], (0,))])
    assert kept.last[:, 0].tolist() == [5, 3, 6]


def test_more_guessed_rows_than_were_planned_are_refused() -> None:
    hidden, batch = step(Span(0, 9, 9, NO_PAGES, 0, None, True))
    kept = states(parallel=1)
    with pytest.raises(CapacityError, match="9 rows, and memory was planned for 8"):
        kept.keep(hidden, batch)
    assert kept.nbytes == (1 + 8) * 4
