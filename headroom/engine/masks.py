"""MaskPool: computes the masks of several constrained answers side by side."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from headroom.engine.request import TokenConstraint
from headroom.layers.draws import TokenMask

MOST_THREADS = 8


class MaskPool:
    """Threads that compute masks while a GPU runs a step.

    Threads help because llguidance releases the interpreter lock.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None  # started when first needed

    def compute(self, wanted: Sequence[TokenConstraint]) -> list[TokenMask | Exception | None]:
        """Return the mask of each constraint; None if any token may come; an error if it failed."""
        if len(wanted) < 2:  # waking a thread would cost more than it saves
            return _masks(wanted)
        most = max(2, min(MOST_THREADS, os.cpu_count() or 1))
        if self._threads is None:
            self._threads = ThreadPoolExecutor(most, thread_name_prefix="headroom-mask")
        # One task per thread, with several masks: handing over a task takes as long as a mask.
        count = min(most, len(wanted))
        found: list[TokenMask | Exception | None] = [None] * len(wanted)
        parts = self._threads.map(_masks, [wanted[first::count] for first in range(count)])
        for first, part in enumerate(parts):
            found[first::count] = part
        return found

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _masks(wanted: Sequence[TokenConstraint]) -> list[TokenMask | Exception | None]:
    return [_mask(constraint) for constraint in wanted]


def _mask(constraint: TokenConstraint) -> TokenMask | Exception | None:
    try:
        return constraint.mask()
    except Exception as error:  # ends one request, not the step
        return error
