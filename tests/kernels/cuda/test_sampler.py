"""The sampler for devices, run on the CPU, against the engine's own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headroom.engine.sampler import _penalised
from headroom.engine.sampler import sample as sample_on_cpu
from headroom.kernels.cuda import sampler
from headroom.kernels.philox import uniform
from tests.sampler_cases import CASES, HISTORY, masks_of, tables_of
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu


@pytest.mark.parametrize("name", CASES)
def test_a_row_draws_the_token_that_the_engine_draws(name: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(24, 300, generator=generator) * 3
    logits[::3] = logits[::3].round()  # ties
    cases = [replace(CASES[name], seed=7 * row - 40, draw=row % 3) for row in range(24)]
    before = logits.clone()
    drawn = sampler.sample(logits, tables_of(cases)).tolist()
    expected = [
        sample_on_cpu(row.numpy(), HISTORY, params)
        for row, params in zip(logits, cases, strict=True)
    ]
    assert drawn == expected
    assert torch.equal(logits, before)


def test_rows_with_different_settings_share_a_call() -> None:
    logits = torch.randn(len(CASES), 300, generator=torch.Generator().manual_seed(1))
    cases = list(CASES.values())
    drawn = sampler.sample(logits, tables_of(cases)).tolist()
    assert drawn == [
        sample_on_cpu(row.numpy(), HISTORY, params)
        for row, params in zip(logits, cases, strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("many", [1, 3, 40, 290])
def test_a_limited_row_draws_the_token_that_the_engine_draws(name: str, many: int) -> None:
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(24, 300, generator=generator) * 3
    cases = [replace(CASES[name], seed=7 * row - 40, draw=row % 3) for row in range(24)]
    tables, masks = tables_of(cases), masks_of(24, 300, many)
    expected = [
        sample_on_cpu(row.numpy(), HISTORY, params, mask)
        for row, params, mask in zip(logits, cases, masks, strict=True)
    ]
    words = torch.from_numpy(masks.view(np.int32))
    assert sampler.sample(logits, tables, words).tolist() == expected
    assert all(
        mask[token // 32] >> (token % 32) & 1 for token, mask in zip(expected, masks, strict=True)
    )
    # One call draws limited rows, another the others; each leaves the tokens of the other.
    tables.limited[::2] = 1
    out = torch.full((24,), -1)
    sampler.sample_into(logits, tables, out, words)
    assert out[::2].tolist() == expected[::2]
    assert set(out[1::2].tolist()) == {-1}
    sampler.sample_into(logits, tables, out)
    assert out[::2].tolist() == expected[::2]
    assert out[1::2].tolist() == sampler.sample(logits, tables)[1::2].tolist()


def test_penalised_logits_have_the_same_bits() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    params = CASES["penalties"]
    ours = sampler.penalise(logits, tables_of([params]))[0].numpy()
    assert np.array_equal(ours, _penalised(logits[0].numpy(), HISTORY, params))


def test_random_numbers_are_the_engines() -> None:
    places = [(0, 0, 0), (1, 2, 3), (-1, 5, 0), (2**63 - 1, 2**40 + 17, 2**33), (-(2**63), 1, 9)]
    seeds, positions, draws = (torch.tensor(part) for part in zip(*places, strict=True))
    assert sampler.uniform(seeds, positions, draws).tolist() == [
        uniform(*place) for place in places
    ]


def test_blocks_sort_as_many_candidates_as_their_shared_memory_holds() -> None:
    assert sampler.candidates_for(64 << 10) == 2048  # sm_75
    assert sampler.candidates_for(99 << 10) == sampler.candidates_for(227 << 10) == 4096


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `sample_fast` run its CUDA kernels on the CPU."""
    monkeypatch.setattr(sampler, "compile_kernel", compile_on_cpu)
    monkeypatch.setattr(sampler, "shared_bytes_of", lambda device: 99 << 10)


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("vocabulary", "many"), [(300, 1), (300, 5), (2500, 40), (2500, 2400)])
def test_cuda_kernels_draw_limited_rows_and_the_others_as_the_engine_does(
    vocabulary: int, many: int
) -> None:
    cases = [replace(params, seed=7 * row) for row, params in enumerate(CASES.values())]
    rows = len(cases)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(many)) * 3
    masks, tables = masks_of(rows, vocabulary, many), tables_of(cases)
    words = torch.from_numpy(masks.view(np.int32))
    scratch = sampler.SamplerScratch.allocate(rows, vocabulary, "cpu")
    for limited in (0, 1):  # every row is once limited and once not
        tables.limited.copy_(torch.arange(rows) % 2 == limited)
        expected = [
            sample_on_cpu(row.numpy(), HISTORY, params, mask if at % 2 == limited else None)
            for at, (row, params, mask) in enumerate(zip(logits, cases, masks, strict=True))
        ]
        out = torch.full((rows,), -1)
        sampler.sample_fast(logits, tables, scratch, out)
        waiting = tables.limited.bool()
        assert set(out[waiting].tolist()) == {-1}
        sampler.sample_fast(logits, tables, scratch, out, words)
        assert out.tolist() == expected
    assert not scratch.counts.any()
