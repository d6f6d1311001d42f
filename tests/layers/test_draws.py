"""The tables of a device's sampler: kept from step to step, changed where requests change."""

from dataclasses import replace

import pytest
import torch

from headroom.engine.request import SamplingParams
from headroom.engine.sampler import sample
from headroom.engine.sequence import draw_settings
from headroom.layers.draws import BIASES, RECENT, DeviceSampler, Draw, DrawSettings

PLAIN = draw_settings(SamplingParams())
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
    requests = [(params, draw_settings(params), [number, 7]) for number, params in enumerate(KINDS)]
    for step in range(40):
        # Requests come, go and change rows; some steps leave a row out.
        shift = step // 6
        chosen = [requests[(shift + row) % len(requests)] for row in range(4)]
        rows = [row for row in range(4) if (step + row) % 5]
        logits = torch.randn(4, 50, generator=generator) * 2
        sampler.fill([(row, Draw(chosen[row][1], chosen[row][2])) for row in rows])
        drawn = sampler.draw(logits).tolist()
        for row in rows:
            params, _, history = chosen[row]
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
        ({"repetition": 1.1, "window": 256}, 10**5, True),
        ({"repetition": 1.1, "window": RECENT + 1}, RECENT, True),
        ({"repetition": 1.1, "window": RECENT + 1}, RECENT + 1, False),
        ({"presence": 0.1, "window": 0}, RECENT, True),
        ({"frequency": 0.1, "window": 0}, RECENT + 1, False),
        ({"bias": dict.fromkeys(range(BIASES), 1.0)}, 3, True),
        ({"bias": dict.fromkeys(range(BIASES + 1), 1.0)}, 3, False),
    ],
)
def test_what_the_tables_hold_fits(changes: dict[str, object], length: int, fits: bool) -> None:
    settings: DrawSettings = replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert Draw(settings, range(length)).fits is fits


def test_all_memory_on_the_device_is_counted() -> None:
    sampler = DeviceSampler.allocate(3, 20, "cpu")
    wide = 3 * (RECENT * 8 + BIASES * 12)
    assert sampler.nbytes == wide + 3 * 9 * 8 + 3 * 8
