"""Settings of requests, and the tables that the sampler for devices reads of them."""

from collections.abc import Sequence

import numpy as np
import torch

from headroom.engine.request import SamplingParams
from headroom.kernels.cuda.sampler import Tables, allocate_tables
from headroom.kernels.cuda.sampler_tables import SAMPLER_SETTINGS
from headroom.layers.draws import TokenMask

HISTORY = [3, 3, 5, 7, 11, 3, 96, 96, 2] * 40
CASES = {
    "greedy": SamplingParams(temperature=0),
    "greedy with penalties": SamplingParams(
        temperature=0, repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.2
    ),
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(temperature=0.8, top_k=5),
    "top-k of one": SamplingParams(top_k=1),
    "top-k and min-p": SamplingParams(top_k=1000, min_p=0.001),
    "top-k beyond a small vocabulary": SamplingParams(top_k=5000),
    "large top-k, hot": SamplingParams(top_k=3000, temperature=2.0, top_p=0.9),
    "top-p": SamplingParams(top_p=0.7),
    "top-p, very hot": SamplingParams(top_p=0.99, temperature=20.0),
    "top-p of nothing": SamplingParams(top_p=0.0),
    "min-p": SamplingParams(min_p=0.1),
    "small min-p, hot": SamplingParams(min_p=0.00001, temperature=5.0),
    "all filters": SamplingParams(
        temperature=1.3, top_k=40, top_p=0.9, min_p=0.05, presence_penalty=0.5
    ),
    "penalties": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4, penalty_window=5
    ),
    "penalties of all tokens": SamplingParams(
        penalty_window=0, repetition_penalty=1.3, frequency_penalty=0.1, top_p=0.9
    ),
    "bias": SamplingParams(logit_bias={4: 9.5, 17: -100.0, 2: 3.25}, top_p=0.95),
}


def tables_of(cases: Sequence[SamplingParams], history: Sequence[int] = HISTORY) -> Tables:
    """The settings of some requests that have the same history, in host memory."""
    tables = allocate_tables(len(cases), "cpu")
    for row, params in enumerate(cases):
        for name in SAMPLER_SETTINGS:
            getattr(tables, name)[row] = getattr(params, name)
        tables.position[row] = len(history)
        recent = history[-params.penalty_window :] if params.penalty_window else history
        tables.recent[row, : len(recent)] = torch.tensor(recent)
        for place, (token, bias) in enumerate(params.logit_bias.items()):
            tables.bias_ids[row, place] = token
            tables.bias[row, place] = bias
    return tables


def masks_of(rows: int, vocabulary: int, many: int) -> TokenMask:
    """Masks `[rows, words]` that allow `many` random tokens each."""
    draw = np.random.default_rng(many)
    bits = np.zeros((rows, -(-vocabulary // 32) * 32), dtype=np.bool_)
    for row in bits:
        row[draw.choice(vocabulary, many, replace=False)] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
