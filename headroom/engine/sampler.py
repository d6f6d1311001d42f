"""The host's sampler: logits to probabilities to a token, one row at a time.

Order: logit bias, repetition, frequency and presence penalties, the mask of a constraint,
temperature, top-k, top-p, min-p, draw. Temperature 0 takes the likeliest token, the lowest id on
ties.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headroom.engine.request import SamplingParams, TokenLogprobs, TopToken
from headroom.errors import ModelError
from headroom.kernels.philox import uniform
from headroom.layers.draws import TokenMask
from headroom.layers.step_timing import part_of_step

LogitRow = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]
FEW = 1024  # likeliest tokens that usually reach top-p together


@part_of_step("sampling")
def sample(
    logits: LogitRow,
    history: Sequence[int],
    params: SamplingParams,
    mask: TokenMask | None = None,  # the tokens that may come; None: any
) -> int:
    """Draw the token that follows `history` (prompt and generated) from the model's logits."""
    scores = _penalised(logits, history, params)
    if mask is None:
        return _draw(scores, len(history), params)
    allowed = _allowed(mask, len(scores))
    if 2 * np.count_nonzero(allowed) > len(scores):
        scores[~allowed] = -np.inf
        return _draw(scores, len(history), params)
    # Few tokens are allowed: drawing among them alone gives the same token and is faster.
    ids = np.flatnonzero(allowed)
    return int(ids[_draw(scores[ids], len(history), params)])


def _draw(scores: LogitRow, position: int, params: SamplingParams) -> int:
    """Return the index of the score that is drawn for a position of the sequence."""
    best = int(scores.argmax())  # NaN counts as the largest
    _check_finite(float(scores[best]))
    if params.temperature == 0:
        return best
    left = _filtered(scores, params)
    bounds = np.cumsum(left.probabilities)
    # At most (1 - 2^-53) times the last bound, which float64 rounds to a number below that bound.
    point = uniform(params.seed, position, params.draw) * bounds[-1]
    index = int(np.searchsorted(bounds, point, side="right"))
    return index if left.ids is None else int(left.ids[index])


def token_logprobs(logits: LogitRow, token: int, top: int) -> TokenLogprobs:
    """Return the log probability of a token, and the `top` likeliest tokens with theirs."""
    peak = float(logits.max())
    _check_finite(peak)
    shifted = np.subtract(logits, peak, dtype=np.float64)
    total = peak + math.log(np.exp(shifted, out=shifted).sum())
    best = _largest(logits, top)
    return TokenLogprobs(
        logprob=float(logits[token]) - total,
        top=tuple(TopToken(int(token), float(logits[token]) - total) for token in best),
    )


def _check_finite(peak: float) -> None:
    """End an answer, by an error, whose logits have a largest value that is no number."""
    if not math.isfinite(peak):
        raise ModelError(
            f"The model computed logits that are not finite: the largest is {peak}.",
            hint="Its weights may be broken, or too large for --dtype f16.",
        )


def _penalised(logits: LogitRow, history: Sequence[int], params: SamplingParams) -> LogitRow:
    scores = logits.copy()
    if biases := params.logit_bias:
        ids = np.fromiter(biases, dtype=np.int64, count=len(biases))
        scores[ids] += np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
    if not params.penalises:
        return scores
    recent = history[-params.penalty_window :] if params.penalty_window else history
    seen, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    values = scores[seen]
    penalty = np.float32(params.repetition_penalty)
    values = np.where(values > 0, values / penalty, values * penalty)
    values -= (params.frequency_penalty * counts).astype(np.float32)
    scores[seen] = values - np.float32(params.presence_penalty)
    return scores


def _allowed(mask: TokenMask, vocab: int) -> npt.NDArray[np.bool_]:
    """Return which tokens a mask allows; those beyond its words are not allowed."""
    allowed = np.zeros(vocab, dtype=np.bool_)
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    allowed[: len(bits)] = bits[:vocab]
    return allowed


class _Candidates(NamedTuple):
    """The tokens that can be drawn."""

    ids: npt.NDArray[np.int64] | None  # ascending; None: all tokens
    probabilities: Probabilities  # of each; not normalised: the likeliest token has 1


def _filtered(scores: LogitRow, params: SamplingParams) -> _Candidates:
    """Return the tokens that are left after temperature, top-k, top-p and min-p."""
    ids = None
    if 0 < params.top_k < len(scores):
        ids = _top_indices(scores, params.top_k)
        scores = scores[ids]
    values = scores.astype(np.float64) / params.temperature
    values -= values.max()
    probabilities: Probabilities = np.exp(values, out=values)
    if params.top_p < 1:
        kept = _top_indices(scores, _count_top_p(probabilities, params.top_p))
        ids = kept if ids is None else ids[kept]
        probabilities = probabilities[kept]
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return _Candidates(ids, probabilities)


def _count_top_p(probabilities: Probabilities, top_p: float) -> int:
    """Return how many of the likeliest tokens together reach `top_p`, at least one.

    Usually few tokens have nearly all of the probability, so only the `FEW` largest numbers are
    sorted, and more of them only if they do not reach `top_p`.
    """
    count, goal = FEW, top_p * probabilities.sum()
    while True:
        ranked = np.sort(probabilities[_near_top(probabilities, count)])[::-1]
        reached = np.cumsum(ranked)
        if len(ranked) == len(probabilities) or reached[-1] >= goal:
            return min(int(np.searchsorted(reached, goal, side="left")) + 1, len(ranked))
        count *= 16


def _largest(values: LogitRow, count: int) -> npt.NDArray[np.int64]:
    """Return the ids of the `count` largest values, largest first, lower ids first on ties."""
    chosen = _top_indices(values, min(count, len(values)))
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _top_indices(values: LogitRow, count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` largest values, ascending; the lowest ones on ties."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    near = _near_top(values, count)
    values = values[near]
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    level = np.flatnonzero(values == border)[: count - len(above)]
    return near[np.sort(np.concatenate((above, level)))]


def _near_top(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` largest values and of some more, ascending.

    The values are cut into groups. The largest values of `count` groups are at least as large as
    the least of them, and so are the `count` largest values of all. Finding the largest value of
    each group takes a small part of the time of `np.partition`.
    """
    size = len(values) // (4 * count)  # values of a group: four groups for each wanted value
    if size < 2:
        return np.arange(len(values))
    groups = values[: len(values) // size * size].reshape(-1, size).max(axis=1)
    bound = np.partition(groups, len(groups) - count)[len(groups) - count]
    return np.flatnonzero(values >= bound)
