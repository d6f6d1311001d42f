"""The governor against simulated machines and drafts: it gains, and loses next to nothing."""

from collections.abc import Callable
from random import Random

import pytest

from headroom.spec.governor import Acceptance, Governor, Offer

PLAIN_S = 0.01
MOST = 8


def simulate(
    right: float,  # the chance that a guess is right
    row_share: float,  # what a row more costs, in plain steps
    tokens: int,
    *,
    sequences: int = 1,
    prior: float = 0.5,
    noise: Callable[[Random], float] = lambda chance: 1.0,
    seed: int = 0,
) -> float:
    """Generate tokens with guesses; return how many times as fast that is as without."""
    chance, governor = Random(seed), Governor()
    known = [Acceptance() for _ in range(sequences)]
    made, seconds = 0, 0.0
    while made < tokens * sequences:
        offers = [Offer(MOST, one.chance(0, prior)) for one in known]
        counts = governor.choose(sequences, offers)
        gained = 0
        for one, count in zip(known, counts, strict=True):
            if not count:
                one.hold_back(0)
                continue
            hits = next((n for n in range(count) if chance.random() >= right), count)
            one.record(0, count, hits)
            gained += hits
        rows = sequences + sum(counts)
        took = PLAIN_S * (1 + row_share * (rows - sequences)) * noise(chance)
        governor.record(sequences, rows, sequences + gained, took)
        made, seconds = made + sequences + gained, seconds + took
    return made / sequences * PLAIN_S / seconds


@pytest.mark.parametrize("row_share", [0.02, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("sequences", [1, 4])
def test_guesses_that_are_never_right_cost_less_than_3_percent_over_256_tokens(
    row_share: float, sequences: int
) -> None:
    for prior in (0.5, 0.95):
        assert simulate(0.0, row_share, 256, sequences=sequences, prior=prior) > 1 / 1.03


@pytest.mark.parametrize(
    ("right", "row_share"), [(0.9, 0.05), (0.9, 0.3), (0.6, 0.05), (1.0, 0.5), (0.3, 0.02)]
)
def test_guesses_that_pay_make_answers_nearly_as_fast_as_the_best_fixed_number(
    right: float, row_share: float
) -> None:
    def fixed(count: int) -> float:
        gained = sum(right**depth for depth in range(1, count + 1))
        return (1 + gained) / (1 + row_share * count)

    best = max(fixed(count) for count in range(MOST + 1))
    assert best > 1.2
    assert simulate(right, row_share, 2000) > 0.85 * best


def test_guesses_that_cannot_pay_are_not_checked_again_and_again() -> None:
    for seed in range(5):
        assert simulate(0.5, 1.0, 3000, seed=seed) > 0.98


def test_a_machine_with_other_work_does_not_mislead_for_long() -> None:
    def noise(chance: Random) -> float:
        return 20.0 if chance.random() < 0.02 else 1.0 + 0.2 * chance.random()

    def loaded(right: float) -> float:
        return simulate(right, 0.1, 3000, noise=noise) / simulate(0.0, 0.1, 3000, noise=noise)

    assert loaded(0.9) > 1.8


def test_a_step_gives_its_rows_to_the_sequences_whose_guesses_are_likeliest() -> None:
    governor = Governor()
    for _ in range(3):
        governor.record(2, 2, 2, PLAIN_S)
    for rows in range(3, 10):
        governor.record(2, rows, rows, PLAIN_S * (1 + 0.2 * (rows - 2)))
    assert governor.choose(2, [Offer(8, 0.1), Offer(8, 0.9)])[0] == 0
    assert governor.choose(2, [Offer(8, 0.1), Offer(8, 0.9)])[1] > 1
    assert governor.choose(2, [Offer(0, 0.9), Offer(8, 0.05)]) == [0, 0]


def test_nothing_is_guessed_before_plain_steps_are_measured() -> None:
    governor, offers = Governor(), [Offer(8, 0.9)]
    assert governor.choose(1, offers) == [0]
    governor.record(1, 1, 1, PLAIN_S)
    assert governor.choose(1, offers) == [0]
    governor.record(1, 1, 1, PLAIN_S)
    assert governor.choose(1, offers)[0] > 0
    assert governor.choose(2, offers * 2) == [0, 0]  # steps of two sequences are others


def test_plain_steps_are_measured_again_while_guesses_are_checked() -> None:
    governor, offers = Governor(), [Offer(8, 0.95)]
    for _ in range(2):
        governor.record(1, 1, 1, PLAIN_S)
    counts = []
    for _ in range(200):
        count = governor.choose(1, offers)[0]
        governor.record(1, 1 + count, 1 + count, PLAIN_S * (1 + 0.05 * count))
        counts.append(count)
    assert 2 <= counts.count(0) <= 5
