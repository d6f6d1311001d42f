"""Time of the host's sampler for one row of logits, against sorting the vocabulary.

    python benchmarks/sampler.py [--vocabulary 49152 151936 262144] [--rounds 9]

`sorted` is the same work with a stable sort of the whole vocabulary. The median round counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from headroom.engine.request import SamplingParams
from headroom.engine.sampler import LogitRow, sample, token_logprobs
from headroom.kernels.philox import uniform

TOP, TOP_P, HISTORY = 20, 0.9, [1, 2, 3]


def sorted_logprobs(logits: LogitRow) -> None:
    """The likeliest tokens and their logprobs, by sorting."""
    values = logits.astype(np.float64)
    normal = values - (values.max() + np.log(np.exp(values - values.max()).sum()))
    _ = [(int(i), float(normal[i])) for i in np.argsort(-values, kind="stable")[:TOP]]


def sorted_top_p(logits: LogitRow) -> None:
    """A token drawn with top-p, by sorting."""
    values = logits.astype(np.float64)
    left = np.exp(values - values.max())
    order = np.argsort(-left, kind="stable")
    reached = np.cumsum(left[order])
    left[order[int(np.searchsorted(reached, TOP_P * reached[-1])) + 1 :]] = 0
    bounds = np.cumsum(left)
    _ = int(np.searchsorted(bounds, uniform(1, len(HISTORY), 0) * bounds[-1], side="right"))


def median_ms(call: Callable[[LogitRow], object], rows: list[LogitRow]) -> float:
    """Milliseconds of one call: the median over rows."""
    times = []
    for row in rows:
        began = time.perf_counter()
        call(row)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def main() -> None:
    """Print one line for each size of vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936, 262144])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    params = SamplingParams(top_p=TOP_P, seed=1)
    print("vocabulary | logprobs: sorted, ours (ms) | top-p: sorted, ours (ms)")
    for size in given.vocabulary:
        draw = np.random.default_rng(size)
        rows = [5 * draw.standard_normal(size, dtype=np.float32) for _ in range(given.rounds)]
        figures = [
            median_ms(sorted_logprobs, rows),
            median_ms(lambda row: token_logprobs(row, 3, TOP), rows),
            median_ms(sorted_top_p, rows),
            median_ms(lambda row: sample(row, HISTORY, params), rows),
        ]
        print(
            f"{size:10} | {figures[0]:.1f}, {figures[1]:.2f} | {figures[2]:.1f}, {figures[3]:.2f}"
        )


if __name__ == "__main__":
    main()
