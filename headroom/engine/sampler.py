"""The host's sampler: logits to probabilities to a token, one row at a time.

Order: logit bias, repetition, frequency and presence penalties, the mask of a constraint,
temperature, top-k, top-p, min-p, draw. Temperature 0 takes the likeliest token, the lowest id on
ties.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headroom.engine.request import SamplingParams, TokenLogprobs
from headroom.kernels.philox import uniform
from headroom.layers.draws import TokenMask
from headroom.layers.step_timing import part_of_step

LogitRow = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]


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
    # Tokens that may not come have no probability: the sums without them are the same, and faster.
    ids = np.flatnonzero(allowed)
    return int(ids[_draw(scores[ids], len(history), params)])


def _draw(scores: LogitRow, position: int, params: SamplingParams) -> int:
    """Return the place of the score that is drawn for a position of the sequence."""
    if params.temperature == 0:
        return int(scores.argmax())
    probabilities = _filtered(scores, params)
    bounds = np.cumsum(probabilities)
    point = uniform(params.seed, position, params.draw) * bounds[-1]
    token = int(np.searchsorted(bounds, point, side="right"))
    # Rounding can put the point on the last bound; the last token with any chance is meant then.
    return token if token < len(bounds) else int(np.flatnonzero(probabilities)[-1])


def token_logprobs(logits: LogitRow, token: int, top: int) -> TokenLogprobs:
    """Return how likely the model found a token, and its `top` likeliest rivals."""
    values = logits.astype(np.float64)
    peak = values.max()
    normal = values - (peak + np.log(np.exp(values - peak).sum()))
    best = _largest(values, top)
    return TokenLogprobs(
        logprob=float(normal[token]),
        top=tuple((int(rival), float(normal[rival])) for rival in best),
    )


def _penalised(logits: LogitRow, history: Sequence[int], params: SamplingParams) -> LogitRow:
    scores = logits.copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
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


def _filtered(scores: LogitRow, params: SamplingParams) -> Probabilities:
    """Probabilities after temperature and the three filters; not normalised again."""
    values = scores.astype(np.float64) / params.temperature
    probabilities: Probabilities = np.exp(values - values.max())
    if 0 < params.top_k < len(probabilities):
        keep = _largest(scores, params.top_k)
        kept = np.zeros_like(probabilities)
        kept[keep] = probabilities[keep]
        probabilities = kept
    if params.top_p < 1:
        _keep_top_p(probabilities, params.top_p)
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return probabilities


def _keep_top_p(probabilities: Probabilities, top_p: float) -> None:
    """Set to zero what lies beyond the likeliest tokens that together reach `top_p`."""
    candidates = np.flatnonzero(probabilities)
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    reached = np.cumsum(probabilities[order])
    keep = int(np.searchsorted(reached, top_p * reached[-1], side="left")) + 1
    probabilities[order[keep:]] = 0


def _largest(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest values, largest first, lower ids first on ties."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    count = min(count, len(values))
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    level = np.flatnonzero(values == border)[: count - len(above)]
    chosen = np.sort(np.concatenate((above, level)))
    return chosen[np.argsort(-values[chosen], kind="stable")]
