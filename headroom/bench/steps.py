"""Whole steps of the network, without the engine around them."""

import time

import torch

from headroom.bench.crowd import random_prompt
from headroom.bench.opening import Opened
from headroom.engine.batching import make_batch
from headroom.engine.request import GenerationRequest, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence
from headroom.layers.batch import Batch
from headroom.plan.settings import pages_for

VARIANTS = 8  # steps with other tokens, so that no expert stays in a processor's cache
MOST_STEPS, ENOUGH_S = 64, 2.0


def step_seconds(opened: Opened, context: int, *, batch: int = 1, rows: int = 1) -> float:
    """Return the mean time of steps in which each sequence has `rows` new tokens.

    The cache before them holds what earlier prompts left there.
    """
    steps = _variants(opened, context, batch, rows)
    with torch.inference_mode():
        for step in steps[:2]:
            _run(opened, step)
        _wait(opened)
        done, started = 0, time.perf_counter()
        while not done or (done < MOST_STEPS and time.perf_counter() - started < ENOUGH_S):
            for step in steps:
                _run(opened, step)
            _wait(opened)
            done += len(steps)
    return (time.perf_counter() - started) / done


def run_steps(opened: Opened, context: int, count: int, *, batch: int = 1, rows: int = 1) -> None:
    """Run so many steps over what earlier prompts left in the cache, and wait for them."""
    steps = _variants(opened, context, batch, rows)
    with torch.inference_mode():
        for turn in range(count):
            _run(opened, steps[turn % VARIANTS])
        _wait(opened)


def _run(opened: Opened, step: Batch) -> None:
    hidden = opened.pipeline.forward(step)
    if opened.on_gpu:
        return  # captured steps end with logits, which stay on the GPU
    most = opened.plan.settings.parallel
    for first in range(0, len(hidden), most):
        opened.pipeline.logits(hidden[first : first + most])


def _wait(opened: Opened) -> None:
    if opened.on_gpu:
        torch.cuda.synchronize(opened.place)


def _variants(opened: Opened, context: int, batch: int, rows: int) -> list[Batch]:
    return [_batch(opened, context, batch, rows, seed) for seed in range(VARIANTS)]


def _batch(opened: Opened, context: int, batch: int, rows: int, seed: int) -> Batch:
    pages, vocab = pages_for(context + rows), opened.pipeline.vocab
    new = [random_prompt(rows, vocab, seed * batch + slot) for slot in range(batch)]
    turns = [Turn(_cached(context, new[slot], slot, pages), rows) for slot in range(batch)]
    return make_batch(turns, opened.plan.settings.page_size)


def _cached(context: int, new: tuple[int, ...], slot: int, pages: int) -> Sequence:
    """Return a sequence of which all but the new tokens are in the cache."""
    request = GenerationRequest(
        id=f"step-{slot}",
        prompt=(0,) * context + new,
        params=SamplingParams(prompt_logprobs=True),  # logits of all rows
        stop_ids=frozenset(),
    )
    own = list(range(slot * pages, (slot + 1) * pages))
    one = Sequence(request, lambda event: None, limit=1 << 30, order=0, pages=own, slot=slot)
    one.cached = context
    return one
