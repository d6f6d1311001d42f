"""The tables of a device's sampler: kept from step to step, changed where requests change."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from headroom.engine.request import SamplingParams
from headroom.engine.sampler import sample
from headroom.kernels.cuda.sampler_tables import (
    BIASES,
    NUMBERS,
    RECENT,
    numbers_bytes,
    sampler_bytes,
)
from headroom.layers import draws
from headroom.layers.draws import DeviceSampler, Draw

PLAIN = SamplingParams()
KINDS = [
    SamplingParams(temperature=0.7, top_k=9, seed=4),
    SamplingParams(repetition_penalty=1.6, penalty_window=5, seed=5),
    SamplingParams(temperature=0, frequency_penalty=0.9, penalty_window=0),
    SamplingParams(logit_bias={3: 5.0, 8: -90.0}, seed=6),
    SamplingParams(logit_bias={4: 6.0}, presence_penalty=1.0, seed=7),
]


def test_rows_keep_and_change_requests_and_draw_what_the_engine_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = DeviceSampler.allocate(4, 50, "cpu")
    requests = [(params, [number, 7]) for number, params in enumerate(KINDS)]
    for step in range(40):
        # Requests come, go and change rows; some steps leave a row out.
        shift = step // 6
        chosen = [requests[(shift + row) % len(requests)] for row in range(4)]
        rows = [row for row in range(4) if (step + row) % 5]
        logits = torch.randn(4, 50, generator=generator) * 2
        sampler.fill([(row, Draw(*chosen[row])) for row in rows])
        drawn = sampler.draw(logits).tolist()
        for row in rows:
            params, history = chosen[row]
            assert drawn[row] == sample(logits[row].numpy(), history, params), (step, row)
            history.append(drawn[row])
        for row in set(range(4)) - set(rows):
            assert int(sampler.tables.temperature[row]) == 0


def test_a_row_that_draws_nothing_takes_the_likeliest_token() -> None:
    sampler = DeviceSampler.allocate(2, 20, "cpu")
    hot = Draw(replace(PLAIN, temperature=50.0), [1])
    logits = torch.zeros(2, 20)
    logits[:, 11] = 0.5
    sampler.fill([(0, hot), (1, hot)])
    sampler.fill([(1, hot)])
    assert int(sampler.draw(logits)[0]) == 11


@pytest.mark.parametrize(
    ("changes", "length", "fits"),
    [
        ({}, 10**5, True),
        ({"repetition_penalty": 1.1, "penalty_window": 256}, 10**5, True),
        ({"repetition_penalty": 1.1, "penalty_window": RECENT + 1}, RECENT, True),
        ({"repetition_penalty": 1.1, "penalty_window": RECENT + 1}, RECENT + 1, False),
        ({"presence_penalty": 0.1, "penalty_window": 0}, RECENT, True),
        ({"frequency_penalty": 0.1, "penalty_window": 0}, RECENT + 1, False),
        ({"logit_bias": dict.fromkeys(range(BIASES), 1.0)}, 3, True),
        ({"logit_bias": dict.fromkeys(range(BIASES + 1), 1.0)}, 3, False),
    ],
)
def test_what_the_tables_hold_fits(changes: dict[str, object], length: int, fits: bool) -> None:
    settings: SamplingParams = replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert Draw(settings, range(length)).fits is fits


def test_the_sampler_takes_the_bytes_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "torch_name", lambda device: "cpu")
    sampler = DeviceSampler.allocate(3, 20, "cuda:0")
    assert sampler.nbytes == sampler_bytes(3, 20)


def test_tables_of_numbers_share_one_piece_of_memory_and_do_not_overlap() -> None:
    sampler = DeviceSampler.allocate(3, 20, "cpu")
    numbers = [getattr(sampler.tables, name) for name in NUMBERS]
    first = min(table.data_ptr() for table in numbers)
    ends = sorted((table.data_ptr() - first, table.nbytes) for table in numbers)
    assert [at for at, _ in ends] == list(accumulate((size for _, size in ends[:-1]), initial=0))
    assert sum(table.nbytes for table in numbers) == numbers_bytes(3)
    assert sampler.tables.top_p.tolist() == sampler.tables.repetition_penalty.tolist() == [1] * 3


def test_limited_rows_are_drawn_when_their_masks_are_known() -> None:
    sampler = DeviceSampler.allocate(4, 50, "cpu")
    greedy = SamplingParams(temperature=0)
    histories = [[1], [2], [3], [4]]
    draws = [
        (row, Draw(greedy, history, limited=row in (1, 3))) for row, history in enumerate(histories)
    ]
    logits = torch.arange(50.0).repeat(4, 1)  # token 49 is the likeliest
    sampler.tokens.fill_(7)
    sampler.fill(draws)
    assert sampler.draw(logits).tolist() == [49, 7, 49, 7]
    few = np.array([1 << 5 | 1 << 9, 0], dtype=np.uint32)
    sampler.draw_limited(logits, {1: few, 3: None})
    assert sampler.tokens.tolist() == [49, 9, 49, 49]
    # The same requests may be free in the next step, and rows that draw nothing are not limited.
    sampler.tokens.fill_(7)
    sampler.fill([(row, Draw(greedy, histories[row])) for row in (0, 1)])
    assert sampler.draw(logits).tolist() == [49] * 4
