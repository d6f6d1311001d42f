"""RoutingStats: how often each expert is chosen; RoutingHistory: the same over days, in a file."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headroom.errors import FormatError
from headroom.experts.placement import VERSION, LayerExperts, check_counts, read_table
from headroom.formats.json_files import replace_text

HALF_LIFE_S = 14 * 24 * 3600.0  # after two weeks a choice counts half


class RoutingStats:
    """Counts of choices, kept where the routers run; every step adds to them."""

    def __init__(self, layers: int, experts: int, device: str) -> None:
        # Of steps of few rows, and of those of many, whose cold experts go other ways.
        self._counts = torch.zeros(2, layers, experts, dtype=torch.int64, device=device)

    def of_layer(self, index: int, *, many: bool = False) -> torch.Tensor:
        """Return a layer's counts `[experts]`, for its router to add to."""
        return self._counts[int(many), index]

    def counts(self) -> torch.Tensor:
        """Return the choices so far, `[layers, experts]`, copied to host memory.

        Layers without experts have zeros.
        """
        return self._counts.cpu().sum(0)

    def with_few_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same, and those of steps of few rows alone, by one copy."""
        host = self._counts.to("cpu", copy=True)
        return host.sum(0), host[0]

    def clear(self) -> None:
        """Forget all choices, those of rows that only warmed a device up."""
        self._counts.zero_()


@dataclass(frozen=True, slots=True)
class RoutingHistory:
    """Choices by layer and expert, the older the less; a layer without experts has an empty row.

    Its file is one JSON object: `version` 1, `model` (the identity of the checkpoint), `saved_at`
    (seconds since 1970) and `counts` (a row of numbers for each layer).
    """

    counts: tuple[tuple[float, ...], ...]
    saved_at: float  # seconds since 1970

    @classmethod
    def empty(cls, layers: Sequence[LayerExperts], now: float) -> "RoutingHistory":
        """Return a history in which nothing was chosen yet."""
        return cls(tuple((0.0,) * layer.experts for layer in layers), now)

    def decayed(self, now: float, half_life_s: float = HALF_LIFE_S) -> "RoutingHistory":
        """Return what the counts are worth now; a clock that went back changes nothing."""
        share = 0.5 ** (max(0.0, now - self.saved_at) / half_life_s)
        counts = tuple(tuple(count * share for count in row) for row in self.counts)
        return RoutingHistory(counts, max(now, self.saved_at))

    def with_choices(self, choices: Sequence[Sequence[int]]) -> "RoutingHistory":
        """Return the history after new choices `[layers, at least as many as experts]`."""
        counts = tuple(
            tuple(old + new for old, new in zip(row, fresh, strict=False))
            for row, fresh in zip(self.counts, choices, strict=True)
        )
        return RoutingHistory(counts, self.saved_at)

    @property
    def total(self) -> float:
        """All choices of all layers."""
        return sum(map(sum, self.counts))


def save_history(path: Path, history: RoutingHistory, identity: str) -> None:
    """Keep a history with the identity of its model."""
    table = {
        "version": VERSION,
        "model": identity,
        "saved_at": history.saved_at,
        "counts": [[round(count, 3) for count in row] for row in history.counts],
    }
    replace_text(path, json.dumps(table, separators=(",", ":")) + "\n")


def load_history(path: Path, identity: str, layers: Sequence[LayerExperts]) -> RoutingHistory:
    """Return the saved history of this model, or refuse the file."""
    table = read_table(path, "routing statistics", identity)
    counts, saved_at = table.get("counts"), table.get("saved_at")
    wrong = "" if _rows_of_counts(counts) else "its counts are not rows of numbers from 0"
    if not (isinstance(saved_at, int | float) and math.isfinite(saved_at)):
        wrong = f"its saved_at is {saved_at!r}, not a number of seconds"
    if wrong:
        raise FormatError(
            f"{path} is not a routing statistics file: {wrong}.", hint="Name another, or a new one."
        )
    assert isinstance(counts, list)
    assert isinstance(saved_at, int | float)
    check_counts(layers, counts)
    return RoutingHistory(tuple(tuple(map(float, row)) for row in counts), float(saved_at))


def _rows_of_counts(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and all(
            isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count < 1e18
            for count in row
        )
        for row in rows
    )
