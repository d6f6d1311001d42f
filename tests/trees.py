"""Draft trees through whole models: a step that checks all paths, and each path on its own."""

from collections.abc import Sequence

import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.formats.checkpoint import Checkpoint
from headroom.layers.batch import Batch, Span
from tests.running import PAGE_SIZE, all_logits, open_pipeline, running

PARENTS = (-1, 0, 0, 1, 2, 2, 4, -1, 7, 5, 3)  # of the rows of a tree; -1: the prompt's end
PAGES = [2, 0, 3, 1]


def tree_mask(parents: Sequence[int] = PARENTS) -> torch.Tensor:
    """Which rows each row sees: itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def path_to(row: int) -> list[int]:
    """The rows from the prompt's end to a row."""
    path: list[int] = tree_mask()[row].nonzero().flatten().tolist()
    return path


def tree_batch(guesses: Sequence[int], start: int) -> Batch:
    """A step that checks guessed tokens, of which `PARENTS` says how they follow each other."""
    mask, place = tree_mask(), torch.arange(start, start + len(guesses))
    pages = torch.tensor(PAGES)
    return Batch(
        tokens=torch.tensor(guesses),
        positions=start + mask.sum(1) - 1,
        kv_slots=pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE,
        spans=(Span(0, len(guesses), start, pages, tree=mask),),
        output_rows=torch.arange(len(guesses)),
    )


def tree_logits(
    checkpoint: Checkpoint, prompt: Sequence[int], guesses: Sequence[int], **settings: object
) -> torch.Tensor:
    """Read a prompt, then a tree of guesses in one step; return the logits of the tree's rows."""
    pipeline = open_pipeline(checkpoint, **settings)
    try:
        turns = [Turn(running(prompt, PAGES), len(prompt))]
        with torch.inference_mode():
            pipeline.forward(make_batch(turns, PAGE_SIZE))
            hidden = pipeline.forward(tree_batch(guesses, len(prompt)))
            return torch.cat([pipeline.logits(rows).clone() for rows in hidden.split(4)])
    finally:
        pipeline.close()


def path_logits(
    checkpoint: Checkpoint, prompt: Sequence[int], guesses: Sequence[int], row: int
) -> torch.Tensor:
    """The logits of one row of a tree whose path follows the prompt as any text does."""
    pipeline = open_pipeline(checkpoint)
    try:
        text = [*prompt, *(guesses[at] for at in path_to(row))]
        return all_logits(pipeline, [Turn(running(text, PAGES), len(text))])[-1]
    finally:
        pipeline.close()
