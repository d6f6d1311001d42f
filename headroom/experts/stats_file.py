"""StatsFile: where a model's routing statistics are kept, what they are, and when they grow."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headroom.errors import FormatError, OptionError
from headroom.experts.placement import LayerExperts
from headroom.experts.stats import RoutingHistory, load_history, save_history
from headroom.formats.json_files import check_folder
from headroom.options import OFF
from headroom.plan.shape import ModelShape

log = logging.getLogger(__name__)

SUFFIX = ".routing.json"


@dataclass(frozen=True, slots=True)
class StatsModel:
    """The model that statistics are of."""

    path: Path  # its main file
    identity: str
    layers: tuple[LayerExperts, ...]
    used: tuple[int, ...]  # experts that a token visits, by layer
    files: frozenset[Path] = frozenset()  # all of them, which nothing may be written over

    @property
    def has_experts(self) -> bool:
        """Whether there is anything to count."""
        return any(layer.experts for layer in self.layers)


@dataclass(frozen=True, slots=True)
class StatsFile:
    """A history that was read, and the place where it is saved."""

    path: Path | None  # None: it is not saved
    history: RoutingHistory  # decayed to the time it was read at

    @property
    def counts(self) -> tuple[tuple[float, ...], ...] | None:
        """What a placement goes by; None where nothing was ever counted."""
        return self.history.counts if self.history.total else None


def stats_model(
    path: Path, identity: str, shape: ModelShape, files: frozenset[Path] = frozenset()
) -> StatsModel:
    """Return what statistics need to know of a model."""
    layers = tuple(LayerExperts(layer.experts, layer.expert_bytes) for layer in shape.layers)
    used = tuple(layer.experts_used for layer in shape.layers)
    return StatsModel(path, identity, layers, used, files)


def open_stats(wanted: str | None, model: StatsModel, home: Path, now: float) -> StatsFile:
    """Read the statistics of a model and decide where they are saved.

    A file that the user names must be this model's, and in order. One that is only found, beside
    the model or in the home folder, is left alone when it is not.
    """
    empty = RoutingHistory.empty(model.layers, now)
    if wanted == OFF or not model.has_experts:
        return StatsFile(None, empty)
    if wanted is not None:
        return _named(Path(wanted).expanduser(), model, empty)
    beside, at_home = default_paths(model, home)
    save_to = next((path for path in (beside, at_home) if writable(path)), None)
    found = [path for path in (beside, at_home) if path.is_file()]
    if not found:
        return StatsFile(save_to, empty)
    history = _found(found, model, now)
    return StatsFile(None, empty) if history is None else StatsFile(save_to, history)


def default_paths(model: StatsModel, home: Path) -> tuple[Path, Path]:
    """Return where statistics are looked for: beside the model, then in the home folder."""
    beside = model.path.with_name(model.path.name + SUFFIX)
    return beside, home / "routing" / f"{model.path.stem}-{model.identity}{SUFFIX}"


def _named(path: Path, model: StatsModel, empty: RoutingHistory) -> StatsFile:
    check_folder(path, "routing_stats")
    history = empty
    if path.exists():
        loaded = load_history(path, model.identity, model.layers)
        history = _newest([(loaded, path)], empty.saved_at)
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


def _found(paths: Sequence[Path], model: StatsModel, now: float) -> RoutingHistory | None:
    """Return the history in files that nobody named; None where one of them is bad."""
    read = []
    for path in paths:
        try:
            read.append((load_history(path, model.identity, model.layers), path))
        except FormatError as error:
            log.warning(
                "routing: statistics are neither used nor saved, now and at every start until %s "
                "is deleted or --routing-stats names another file; the run goes on with even "
                "placement, unless --placement names another: %s",
                path,
                error.message,
            )
            return None
    return _newest(read, now)


def _newest(read: Sequence[tuple[RoutingHistory, Path]], now: float) -> RoutingHistory:
    """Return the history that was saved last, decayed.

    Of a model in a folder that cannot be written, that is the one at home, which went on from the
    one beside the model; or the latter, where somebody else has made it anew since.
    """
    loaded, path = max(read, key=lambda both: both[0].saved_at)
    # Counts from the future, of a clock that was wrong, would not fade until then.
    history = replace(loaded, saved_at=min(loaded.saved_at, now)).decayed(now)
    log.info("routing: %.0f choices from %s", history.total, path)
    return history


def writable(path: Path) -> bool:
    """Whether a file may be put there; folders that are missing are made."""
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        return False
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


class HistoryKeeper:
    """Adds what routers count to a history, and saves it now and then; the last writer wins."""

    def __init__(self, file: StatsFile, identity: str) -> None:
        self._path, self._history, self._identity = file.path, file.history, identity
        self._taken = [[0] * len(row) for row in file.history.counts]
        self._unsaved = False

    @property
    def saves(self) -> bool:
        """Whether there is a file to save to."""
        return self._path is not None

    def take(self, counts: Sequence[Sequence[int]], now: float) -> RoutingHistory:
        """Add the choices that are new since the last call; return the whole history."""
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
        """Write the file if anything was chosen since; a failure is told and changes nothing."""
        if self._path is None or not self._unsaved:
            return
        try:
            save_history(self._path, self._history, self._identity)
        except OSError as error:
            log.warning("routing: cannot save %s: %s", self._path, error.strerror)
            return
        self._unsaved = False
        log.info("routing: %.0f choices saved to %s", self._history.total, self._path)
