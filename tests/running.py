"""Run a model step by step, without an engine, and see the logits of every row."""

from collections.abc import Sequence

import torch

from headroom.engine.batching import make_batch
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence as Running
from headroom.formats.checkpoint import Checkpoint
from headroom.machine.targets import plan_devices
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.split.launch import start_pipeline
from headroom.split.pipeline import Pipeline

PAGE_SIZE = 64


def open_pipeline(checkpoint: Checkpoint, **settings: object) -> Pipeline:
    """Load a checkpoint with a small cache in float32."""
    given = {"context": 256, "parallel": 4, "kv_type": "f32", "dtype": "f32", "threads": 2}
    given |= settings
    options = Options(**given)  # type: ignore[arg-type]
    model = describe(checkpoint)
    return start_pipeline(make_plan([model.shape], plan_devices(options), options), model)


def running(tokens: Sequence[int], pages: list[int], state_slot: int = 0) -> Running:
    """A sequence that has its pages already."""
    params = SamplingParams(prompt_logprobs=True)
    request = GenerationRequest(
        id=str(pages), prompt=tuple(tokens), params=params, stop_ids=frozenset()
    )
    return Running(request, lambda event: None, limit=10**6, pages=pages, state_slot=state_slot)


def run_steps(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[int]],
    head_rows: int = 1,
    **settings: object,
) -> list[torch.Tensor]:
    """Read prompts together, each in pieces of the given sizes; return logits of all rows.

    The head gets so many rows at once; more are faster, and may differ in their last bits.
    """
    pipeline = open_pipeline(checkpoint, **settings)
    # Pages in an order of their own, so that nothing relies on neighbours.
    sequences = [
        running(prompt, [4 * index + page for page in (2, 0, 3, 1)], state_slot=index)
        for index, prompt in enumerate(prompts)
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(max(map(len, pieces))):
        chosen = [index for index, sizes in enumerate(pieces) if step < len(sizes)]
        turns = [Turn(sequences[index], pieces[index][step]) for index in chosen]
        rows = all_logits(pipeline, turns, head_rows)
        for index, turn in zip(chosen, turns, strict=True):
            logits[index].append(rows[: turn.rows])
            rows = rows[turn.rows :]
            turn.sequence.cached += turn.rows
    pipeline.close()
    return [torch.cat(parts) for parts in logits]


def all_logits(pipeline: Pipeline, turns: list[Turn], head_rows: int = 1) -> torch.Tensor:
    """Run a step and return the logits of its output rows, a few rows at a time."""
    with torch.inference_mode():
        hidden = pipeline.forward(make_batch(turns, PAGE_SIZE))
        return torch.cat([pipeline.logits(rows).clone() for rows in hidden.split(head_rows)])


def greedy_tokens(checkpoint: Checkpoint, prompt: Sequence[int], count: int) -> list[int]:
    """Continue a prompt by the likeliest token, one step each."""
    pipeline = open_pipeline(checkpoint)
    sequence = running(prompt, [1, 3, 0, 2])
    for _ in range(count):
        rows = sequence.pending
        with torch.inference_mode():
            hidden = pipeline.forward(make_batch([Turn(sequence, rows)], PAGE_SIZE))
        sequence.cached += rows
        sequence.tokens.append(int(pipeline.logits(hidden[-1:]).argmax()))
    return sequence.tokens[len(prompt) :]
