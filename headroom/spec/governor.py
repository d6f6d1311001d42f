"""Governor: how many guesses of each sequence a step verifies, by what steps have cost and given.

A row more makes a step longer, and how much longer depends on the model and the machine. So the
governor measures steps by their rows, counts which guesses were right, and takes the guesses that
make the most tokens a second, or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEARNING = 0.2  # weight of the last step in the mean of steps with as many rows
NOISE = 2.0  # a step counts as at most so many times the mean: others may have used the machine
LEAST_STEPS = 2  # plain steps that are measured before the first guess
PLAIN_EVERY = 64  # steps with guesses after which one without is measured again
ROW_SHARE = 0.1  # of a plain step: what a row more is taken to cost before one was measured
LEAST_GAIN = 1.02  # times as many tokens a second as without guesses, at least
# Time that guesses may have cost in all, beyond what the same tokens take without them: some plain
# steps, and a share of the time since. Over 256 tokens that is less than 3 %.
LOST_STEPS, LOST_SHARE = 4.0, 0.01
CHANCE_WEIGHT = 2.0  # guesses that a drafter's own estimate counts for
MEMORY = 0.9  # of what was counted, kept at each draft of the kind that was verified
FADING = 0.98  # and at each that was held back, so that it is tried again


class Acceptance:
    """How often guesses for one sequence were right, by the kind of its drafts."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}  # by kind: right guesses, and all judged

    def chance(self, kind: int, prior: float) -> float:
        """Return how likely a guess is right, if those before it are."""
        right, judged = self._counts.get(kind, (0.0, 0.0))
        return (right + CHANCE_WEIGHT * prior) / (judged + CHANCE_WEIGHT)

    def record(self, kind: int, guesses: int, right: int) -> None:
        """Count a chain of which the first `right` guesses were right; the next one was wrong."""
        self._fade(kind, MEMORY)
        known, judged = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = known + right, judged + right + (right < guesses)

    def hold_back(self, kind: int) -> None:
        """Forget a little, since a draft was not verified."""
        self._fade(kind, FADING)

    def _fade(self, kind: int, share: float) -> None:
        if kind in self._counts:
            right, judged = self._counts[kind]
            self._counts[kind] = share * right, share * judged


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A draft of one sequence that a step may verify, or its beginning."""

    guesses: int
    chance: float  # that a guess is right, if those before it are


class Governor:
    """Chooses how many guesses steps verify; one for an engine."""

    def __init__(self) -> None:
        # Mean seconds of steps, by the sequences in them and their rows.
        self._seconds: dict[int, dict[int, float]] = {}
        self._plain_steps: dict[int, int] = {}  # measured, by the sequences in them
        self._drafted_steps = 0  # since the last plain one
        self._lost_s = 0.0  # what steps with guesses took beyond the same tokens without
        self._total_s = 0.0  # of all steps

    def choose(self, sequences: int, offers: Sequence[Offer]) -> list[int]:
        """Return how many guesses of each offer to verify in a step of so many sequences."""
        chosen = [0] * len(offers)
        if not self._may_guess(sequences):
            return chosen
        known = self._seconds[sequences]
        plain_s, most_s = known[sequences], self._most_lost_s(sequences)
        # Steps that are longer than any measured one grow slowly: their cost is not known.
        most_rows = sequences + max(1, 2 * (max(known) - sequences))
        gains = [
            (offer.chance**depth, number)
            for number, offer in enumerate(offers)
            for depth in range(1, 1 + offer.guesses)
        ]
        gains.sort(key=lambda gain: -gain[0])  # those of one offer stay in their order
        tokens, taken = float(sequences), 0
        best = LEAST_GAIN * tokens / plain_s
        for count, (gain, _) in enumerate(gains[: most_rows - sequences], start=1):
            step_s = self.step_s(sequences, sequences + count)
            if self._lost_s + step_s - plain_s > most_s:  # if all of them are wrong
                break
            tokens += gain
            rate = tokens / step_s
            if rate > best:
                best, taken = rate, count
        for _, number in gains[:taken]:
            chosen[number] += 1
        return chosen

    def step_s(self, sequences: int, rows: int) -> float:
        """Return the seconds that a step is expected to take.

        Rows that were not measured lie on the line between those that were.
        """
        known = self._seconds[sequences]
        if rows in known:
            return known[rows]
        below = max(x for x in known if x < rows)
        above = min((x for x in known if x > rows), default=None)
        if above is not None:
            share = (rows - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        first = min(known)
        slope = ROW_SHARE * known[first]
        if below > first:
            slope = max(0.0, known[below] - known[first]) / (below - first)
        return known[below] + slope * (rows - below)

    def record(self, sequences: int, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step in which all sequences decoded; `rows` has one for each guess, too."""
        known = self._seconds.setdefault(sequences, {})
        plain = rows == sequences
        if plain:
            self._plain_steps[sequences] = self._plain_steps.get(sequences, 0) + 1
            self._drafted_steps = 0
        elif sequences not in known:
            return  # nothing to compare it with
        else:
            self._drafted_steps += 1
            seconds = min(seconds, NOISE * self.step_s(sequences, rows))
            self._lost_s += seconds - tokens / sequences * known[sequences]
        self._total_s += seconds
        before = known.get(rows, seconds)
        known[rows] = before + LEARNING * (min(seconds, NOISE * before) - before)

    def _may_guess(self, sequences: int) -> bool:
        if self._plain_steps.get(sequences, 0) < LEAST_STEPS:
            return False
        if self._drafted_steps >= PLAIN_EVERY:
            return False
        # What was won counts, but only as much as may be lost: old gains excuse no new losses.
        self._lost_s = max(self._lost_s, -self._most_lost_s(sequences))
        return True

    def _most_lost_s(self, sequences: int) -> float:
        """Return how much time guesses may have cost by now."""
        return LOST_STEPS * self._seconds[sequences][sequences] + LOST_SHARE * self._total_s
