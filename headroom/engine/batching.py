"""Scheduled sequences to one Batch."""

from collections.abc import Sequence as SequenceOf

import torch

from headroom.engine.scheduler import Turn
from headroom.layers.batch import Batch, Span


def make_batch(turns: SequenceOf[Turn], page_size: int) -> Batch:
    """Lay the turns' rows one after another."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    slots: list[torch.Tensor] = []
    outputs: list[int] = []
    for turn in turns:
        sequence, start = turn.sequence, turn.sequence.cached
        pages = torch.tensor(sequence.pages)
        span = Span(len(tokens), turn.rows, start, pages, sequence.slot)
        position = torch.arange(start, start + turn.rows)
        slots.append(span.pages[position // page_size] * page_size + position % page_size)
        tokens += sequence.tokens[start : start + turn.rows]
        positions += position.tolist()
        outputs += output_rows(turn, span.first_row)
        spans.append(span)
    return Batch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slots=torch.cat(slots),
        spans=tuple(spans),
        output_rows=torch.tensor(outputs, dtype=torch.int64),
    )


def output_rows(turn: Turn, first_row: int) -> range:
    """The rows whose logits a turn needs: all that predict a token it must weigh or draw."""
    last = first_row + turn.rows
    if wants_prompt_logprobs(turn):
        return range(first_row, last)
    finishes = turn.rows == turn.sequence.pending
    return range(last - 1, last) if finishes else range(0)


def wants_prompt_logprobs(turn: Turn) -> bool:
    """Whether this turn reads prompt tokens whose likelihood was asked for and is not known."""
    sequence = turn.sequence
    known = len(sequence.prompt_logprobs)
    return sequence.request.params.prompt_logprobs and known < len(sequence.request.prompt)
