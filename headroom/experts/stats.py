"""Routing statistics: how often each expert is chosen.

`RoutingStats` counts on the device while a model runs. A `RoutingHistory` holds the counts of many
days, the older the less, and is kept in a file (`StatsFile`), from which the next start places
experts. A `HistoryKeeper` adds new counts to the history and saves it.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from headroom.errors import FormatError, OptionError
from headroom.experts.placement import RECORDS_VERSION, LayerExperts, check_counts, read_table
from headroom.formats.atomic import replace_text
from headroom.formats.json_files import check_folder
from headroom.formats.other_stores import owner_of
from headroom.options import OFF
from headroom.plan.shape import ModelShape

log = logging.getLogger(__name__)

HALF_LIFE_S = 14 * 24 * 3600.0  # after two weeks a choice counts for half


@dataclass(frozen=True, slots=True, eq=False)
class RouterCounts:
    """The choices of one layer's router, which it adds to; each int64 `[experts]`."""

    decode: torch.Tensor  # in steps of few rows
    prefill: torch.Tensor  # in steps of many rows


class RoutingStats:
    """Counts how often each expert was chosen, on the device where the routers run."""

    def __init__(self, layers: int, experts: int, device: str) -> None:
        # Decode and prefill steps apart: their cold experts take different paths.
        self._counts = torch.zeros(2, layers, experts, dtype=torch.int64, device=device)

    def of_layer(self, index: int, experts: int | None = None) -> RouterCounts:
        """Return the counts of a layer with so many experts, for its router to add to."""
        decode, prefill = self._counts[:, index, :experts].unbind()
        return RouterCounts(decode, prefill)

    def counts(self) -> torch.Tensor:
        """Return all choices so far, `[layers, experts]`, copied to host memory.

        Layers without experts have zeros.
        """
        return self._counts.cpu().sum(0)

    def counts_with_decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all choices so far, and those of decode steps alone, by one copy."""
        host = self._counts.to("cpu", copy=True)
        return host.sum(0), host[0]

    def like(self) -> "RoutingStats":
        """Return empty counts of the same layers and experts on the same device."""
        _, layers, experts = self._counts.shape
        return RoutingStats(layers, experts, str(self._counts.device))

    def add(self, layers: torch.Tensor, ids: torch.Tensor, *, decode: bool) -> None:
        """Count picks `[layers, rows, used]` of some layers; negative ids are no picks.

        `layers` has their numbers, int64. Everything stays on the device.
        """
        counts = self._counts[0 if decode else 1]
        flat = layers[:, None, None] * counts.shape[1] + ids.clamp(min=0)
        counts.view(-1).scatter_add_(0, flat.view(-1), (ids >= 0).long().view(-1))

    def clear(self) -> None:
        """Forget all choices, such as those of rows that only warmed up a device."""
        self._counts.zero_()


@dataclass(frozen=True, slots=True)
class RoutingHistory:
    """Choices by layer and expert, which count less as they age; a dense layer has an empty row.

    The file is one JSON object: `version` 1, `model` (the identity of the checkpoint), `saved_at`
    (seconds since 1970) and `counts` (a row of numbers for each layer).
    """

    counts: tuple[tuple[float, ...], ...]
    saved_at: float  # seconds since 1970

    @classmethod
    def empty(cls, layers: Sequence[LayerExperts], now: float) -> "RoutingHistory":
        """Return a history without choices."""
        return cls(tuple((0.0,) * layer.experts for layer in layers), now)

    def decayed(self, now: float, half_life_s: float = HALF_LIFE_S) -> "RoutingHistory":
        """Return the history faded to the time `now`; a clock that went back changes nothing."""
        share = 0.5 ** (max(0.0, now - self.saved_at) / half_life_s)
        counts = tuple(tuple(count * share for count in row) for row in self.counts)
        return RoutingHistory(counts, max(now, self.saved_at))

    def with_choices(self, choices: Sequence[Sequence[int]]) -> "RoutingHistory":
        """Return the history with new choices added; rows of `choices` may be longer."""
        counts = tuple(
            tuple(old + new for old, new in zip(row, fresh, strict=False))
            for row, fresh in zip(self.counts, choices, strict=True)
        )
        return RoutingHistory(counts, self.saved_at)

    @property
    def total(self) -> float:
        """The sum of all choices of all layers."""
        return sum(map(sum, self.counts))


def save_history(path: Path, history: RoutingHistory, identity: str) -> None:
    """Save a history with the identity of its model."""
    table = {
        "version": RECORDS_VERSION,
        "model": identity,
        "saved_at": history.saved_at,
        "counts": [[round(count, 3) for count in row] for row in history.counts],
    }
    replace_text(path, json.dumps(table, separators=(",", ":")) + "\n")


def load_history(path: Path, identity: str, layers: Sequence[LayerExperts]) -> RoutingHistory:
    """Load a history; refuse a file that is not of this model."""
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


SUFFIX = ".routing.json"


@dataclass(frozen=True, slots=True)
class StatsModel:
    """What statistics need to know about their model."""

    path: Path  # its main file
    identity: str
    layers: tuple[LayerExperts, ...]
    used: tuple[int, ...]  # experts that a token visits, by layer
    files: frozenset[Path] = frozenset()  # all files of the model, which must not be overwritten

    @property
    def has_experts(self) -> bool:
        """Whether any layer has routed experts."""
        return any(layer.experts for layer in self.layers)


@dataclass(frozen=True, slots=True)
class StatsFile:
    """A history that was read, and where it will be saved."""

    path: Path | None  # None: the history is not saved
    history: RoutingHistory  # faded to the time when it was read
    broken: tuple[Path, ...] = ()  # files that are moved aside when the history is saved

    @property
    def counts(self) -> tuple[tuple[float, ...], ...] | None:
        """The counts that place experts; None if nothing was ever counted."""
        return self.history.counts if self.history.total else None


def stats_model(
    path: Path, identity: str, shape: ModelShape, files: frozenset[Path] = frozenset()
) -> StatsModel:
    """Return what statistics need to know about a model with this shape."""
    layers = tuple(LayerExperts(layer.experts, layer.expert_bytes) for layer in shape.layers)
    used = tuple(layer.experts_used for layer in shape.layers)
    return StatsModel(path, identity, layers, used, files)


def open_stats(wanted: str | None, model: StatsModel, home: Path, now: float) -> StatsFile:
    """Read the statistics of a model, and decide where they are saved.

    `wanted` is the setting routing_stats. A file that the user names must be valid and of this
    model. A file that is only found, beside the model or in the home folder, is ignored with a
    warning if it is not; it is moved aside when new statistics are saved.
    """
    empty = RoutingHistory.empty(model.layers, now)
    if wanted == OFF or not model.has_experts:
        return StatsFile(None, empty)
    if wanted is not None:
        return _named(Path(wanted).expanduser(), model, empty)
    paths = default_paths(model, home)
    save_to = next((path for path in paths if writable(path)), None)
    read, broken = [], []
    for path in paths:
        try:
            if path.is_file():
                read.append(_ReadHistory(load_history(path, model.identity, model.layers), path))
        except FormatError as error:
            log.warning(
                "routing: %s is not used, and is moved to %s when new statistics are saved: %s",
                path,
                _aside(path),
                error.message,
            )
            broken.append(path)
    history = _newest(read, now) if read else empty
    return StatsFile(save_to, history, tuple(broken))


def default_paths(model: StatsModel, home: Path) -> tuple[Path, ...]:
    """Return where to look for statistics: beside the model, and in the home folder.

    Nothing is written into the folders of other programs.
    """
    at_home = home / "routing" / f"{model.path.stem}-{model.identity}{SUFFIX}"
    if owner_of(model.path):
        return (at_home,)
    return model.path.with_name(model.path.name + SUFFIX), at_home


def _named(path: Path, model: StatsModel, empty: RoutingHistory) -> StatsFile:
    check_folder(path, "routing_stats")
    history = empty
    if path.exists() and path.stat().st_size:  # an empty file is a new one
        loaded = load_history(path, model.identity, model.layers)
        history = _newest([_ReadHistory(loaded, path)], empty.saved_at)
    if writable(path):
        return StatsFile(path, history)
    if not path.exists():
        raise OptionError(
            f"--routing-stats {path} cannot be written.",
            hint=f"Name another file, or {OFF} for none.",
            param="routing_stats",
        )
    log.warning("routing: %s cannot be written; new choices are not saved", path)
    return StatsFile(None, history)


class _ReadHistory(NamedTuple):
    """A history and the file that it was read from."""

    history: RoutingHistory
    path: Path


def _newest(read: Sequence[_ReadHistory], now: float) -> RoutingHistory:
    """Return the history that was saved last, faded to now.

    If the model's folder cannot be written, the file in the home folder continues the one beside
    the model. The one beside the model is newer if somebody has replaced it since.
    """
    loaded, path = max(read, key=lambda one: one.history.saved_at)
    # Counts from the future (the clock was wrong) would not fade until then.
    history = replace(loaded, saved_at=min(loaded.saved_at, now)).decayed(now)
    log.info("routing: %.0f choices from %s", history.total, path)
    return history


def _aside(path: Path) -> Path:
    """Return the name that a broken file gets when a new one is saved."""
    return path.with_name(path.name + ".broken")


def writable(path: Path) -> bool:
    """Return whether a file can be written there; missing folders can be made."""
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        return False
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


class HistoryKeeper:
    """Adds what routers count to a history, and saves it; the last of several writers wins."""

    def __init__(self, file: StatsFile, identity: str) -> None:
        self._path, self._history, self._identity = file.path, file.history, identity
        self._broken = file.broken
        self._taken = [[0] * len(row) for row in file.history.counts]  # counts added so far
        self._unsaved = False

    @property
    def saves(self) -> bool:
        """Whether there is a file to save to."""
        return self._path is not None

    def take(self, counts: Sequence[Sequence[int]], now: float) -> RoutingHistory:
        """Add the choices since the last call to the history, and return it."""
        new = [
            [count - before for count, before in zip(row, old, strict=False)]
            for row, old in zip(counts, self._taken, strict=True)
        ]
        if any(map(any, new)):
            self._history = self._history.decayed(now).with_choices(new)
            self._taken = [list(row) for row in counts]
            self._unsaved = True
        return self._history

    def save(self) -> None:
        """Write the file if there are new choices; a failure is logged and changes nothing."""
        if self._path is None or not self._unsaved:
            return
        try:
            self._move_aside()
            save_history(self._path, self._history, self._identity)
        except OSError as error:
            log.warning("routing: cannot save %s: %s", self._path, error.strerror)
            return
        self._unsaved = False
        log.info("routing: %.0f choices saved to %s", self._history.total, self._path)

    def _move_aside(self) -> None:
        """Rename broken files, so that they are neither read again nor lost."""
        for path in self._broken:
            if writable(path) and path.exists():
                path.replace(_aside(path))
        self._broken = ()
