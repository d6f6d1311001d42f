"""The sampler for devices, run on the CPU, against the engine's own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headroom.engine.random import uniform
from headroom.engine.request import SamplingParams
from headroom.engine.sampler import _penalised
from headroom.engine.sampler import sample as sample_on_cpu
from headroom.kernels.cuda import sampler

HISTORY = [3, 3, 5, 7, 11, 3, 96, 96, 2]
CASES = {
    "greedy": SamplingParams(temperature=0),
    "greedy with penalties": SamplingParams(
        temperature=0, repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.2
    ),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=0.8, top_k=5),
    "top-k beyond the vocabulary": SamplingParams(top_k=5000),
    "top-p": SamplingParams(top_p=0.7),
    "top-p of nothing": SamplingParams(top_p=0.0),
    "min-p": SamplingParams(min_p=0.1),
    "all filters": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4, penalty_window=5
    ),
    "bias": SamplingParams(logit_bias={4: 9.5, 17: -100.0, 2: 3.25}, top_p=0.95),
}


def tables_of(cases: list[SamplingParams], history: list[int]) -> sampler.SamplerTables:
    tables = sampler.SamplerTables.allocate(len(cases), 16, 4, "cpu")
    for row, params in enumerate(cases):
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "draw"):
            getattr(tables, name)[row] = getattr(params, name)
        tables.repetition[row] = params.repetition_penalty
        tables.frequency[row] = params.frequency_penalty
        tables.presence[row] = params.presence_penalty
        tables.position[row] = len(history)
        recent = history[-params.penalty_window :] if params.penalty_window else history
        tables.recent[row, : len(recent)] = torch.tensor(recent)
        for place, (token, bias) in enumerate(params.logit_bias.items()):
            tables.bias_ids[row, place] = token
            tables.bias[row, place] = bias
    return tables


@pytest.mark.parametrize("name", CASES)
def test_a_row_draws_the_token_that_the_engine_draws(name: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(24, 300, generator=generator) * 3
    logits[::3] = logits[::3].round()  # ties
    cases = [replace(CASES[name], seed=7 * row - 40, draw=row % 3) for row in range(24)]
    before = logits.clone()
    drawn = sampler.sample(logits, tables_of(cases, HISTORY)).tolist()
    expected = [
        sample_on_cpu(row.numpy(), HISTORY, params)
        for row, params in zip(logits, cases, strict=True)
    ]
    assert drawn == expected
    assert torch.equal(logits, before)


def test_rows_with_different_settings_share_a_call() -> None:
    logits = torch.randn(len(CASES), 300, generator=torch.Generator().manual_seed(1))
    cases = list(CASES.values())
    drawn = sampler.sample(logits, tables_of(cases, HISTORY)).tolist()
    assert drawn == [
        sample_on_cpu(row.numpy(), HISTORY, params)
        for row, params in zip(logits, cases, strict=True)
    ]


def test_penalised_logits_have_the_same_bits() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    params = CASES["penalties"]
    ours = sampler.penalise(logits, tables_of([params], HISTORY))[0].numpy()
    assert np.array_equal(ours, _penalised(logits[0].numpy(), HISTORY, params))


def test_random_numbers_are_the_engines() -> None:
    places = [(0, 0, 0), (1, 2, 3), (-1, 5, 0), (2**63 - 1, 2**40 + 17, 2**33), (-(2**63), 1, 9)]
    seeds, positions, draws = (torch.tensor(part) for part in zip(*places, strict=True))
    assert sampler.uniform(seeds, positions, draws).tolist() == [
        uniform(*place) for place in places
    ]
