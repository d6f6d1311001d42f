"""Puts the rows of all scheduled turns into one Batch."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from headroom.engine.scheduler import Turn
from headroom.layers.batch import Batch, Span


def make_batch(turns: SequenceOf[Turn], page_size: int) -> Batch:
    """Return the rows of all turns, one after another, as one batch."""
    tokens: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    spans: list[Span] = []
    outputs: list[int] = []
    for turn in turns:
        sequence, start, rows = turn.sequence, turn.sequence.cached, turn.all_rows
        pages, first_row = sequence.page_table(), len(tokens)
        tree = None
        if turn.draft:
            tree = turn.draft.mask()
            tokens += (sequence.tokens[start], *turn.draft.tokens)
            positions += (start + depth for depth in turn.draft.depths())
            kv_slots += _kv_slots(pages, start, rows, page_size)
        elif rows == 1:  # the usual turn, in which plain numbers are faster than arrays
            tokens.append(sequence.tokens[start])
            positions.append(start)
            kv_slots.append(sequence.pages[start // page_size] * page_size + start % page_size)
        else:
            tokens += sequence.tokens[start : start + rows]
            positions += range(start, start + rows)
            kv_slots += _kv_slots(pages, start, rows, page_size)
        guessed = len(turn.draft) > 0
        spans.append(Span(first_row, rows, start, pages, sequence.state_slot, tree, guessed))
        outputs += output_rows(turn, first_row)
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        kv_slots=torch.tensor(kv_slots),
        spans=tuple(spans),
        output_rows=torch.tensor(outputs, dtype=torch.int64),
    )


def _kv_slots(pages: torch.Tensor, start: int, rows: int, page_size: int) -> list[int]:
    """Return where the keys and values of a sequence's next rows are cached."""
    place = np.arange(start, start + rows)
    found: list[int] = (pages.numpy()[place // page_size] * page_size + place % page_size).tolist()
    return found


def output_rows(turn: Turn, first_row: int) -> range:
    """Return the rows of a turn whose output is needed: for prompt logprobs, a draw or a vector."""
    sequence, last = turn.sequence, first_row + turn.all_rows
    if turn.draft:
        return range(first_row, last)
    every_row = wants_prompt_logprobs(turn) or sequence.request.pooling == "mean"
    if every_row:
        return range(first_row, last)
    finishes = turn.rows == len(sequence.tokens) - sequence.cached
    return range(last - 1 if finishes else last, last)


def wants_prompt_logprobs(turn: Turn) -> bool:
    """Whether prompt logprobs are asked for and this turn computes some that are not known."""
    request = turn.sequence.request
    known = len(turn.sequence.prompt_logprobs)
    return request.params.prompt_logprobs and known < len(request.prompt)
