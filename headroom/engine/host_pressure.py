"""HostPressure: gives up kept prefixes in host memory before the system ends the process."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from headroom.engine.prefix_cache import PrefixCache
from headroom.layers.cache import CacheMover
from headroom.machine.devices import HostRoom, host_room
from headroom.units import MIB, gib

log = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between looks at host memory
# With less than this left host memory is short: half of what the plan leaves free.
LEAST_SHARE = 1 / 32  # of all host memory, and
MOST_LEAST = 256 * MIB  # at most


@dataclass(frozen=True, slots=True)
class HostTier:
    """What the prefix cache has in host memory, in all stages together."""

    pages_bytes: int
    snapshots_bytes: int


class HostPressure:
    """Empties the prefix cache's host memory while this is short: first pages, then snapshots.

    Only the engine's thread calls it, between steps. Files keep what they have.
    """

    def __init__(self, cache: PrefixCache, mover: CacheMover, tier: HostTier) -> None:
        self._cache, self._mover = cache, mover
        self._kinds = {"pages": tier.pages_bytes, "snapshots": tier.snapshots_bytes}
        self._given: list[str] = []  # the kinds that are given up now
        self._closing = False  # a kind takes no more, but something still uses its memory
        self._told = False  # that there is nothing more to give up

    @property
    def watches(self) -> bool:
        """Whether there is anything to give up."""
        return any(self._kinds.values())

    def concerns(self, room: HostRoom) -> bool:
        """Return whether `look` may have anything to do; any thread may ask."""
        short = room.available_bytes < _least_bytes(room)
        return short or self._closing or bool(self._given)

    def look(self, room: HostRoom) -> None:
        """Give up one kind if host memory is short; take all back if it would not be short then."""
        least = _least_bytes(room)
        given = sum(self._kinds[kind] for kind in self._given)
        if room.available_bytes < least:
            self._give_up(room, least)
        elif (self._given or self._closing) and room.available_bytes - given >= 2 * least:
            self._given, self._closing, self._told = [], False, False
            self._cache.open_host()
            log.info(
                "pressure: %s of %s of host memory are free; prefixes are kept there again",
                *(gib(room.available_bytes), gib(room.total_bytes)),
            )

    def _give_up(self, room: HostRoom, least: int) -> None:
        left = [kind for kind, size in self._kinds.items() if size and kind not in self._given]
        told = gib(room.available_bytes), gib(room.total_bytes), gib(least)
        if not left:
            if not self._told:
                log.warning(
                    "pressure: %s of %s of host memory are free, less than %s, and the prefix "
                    "cache has nothing more to give up there",
                    *told,
                )
            self._told = True
            return
        kind = left[0]
        self._closing = not self._cache.close_host(snapshots=kind == "snapshots")
        if self._closing:
            return  # sequences that run, or files that are written, still need some of it
        if kind == "pages":
            self._mover.drop_host_pages()
        else:
            self._mover.drop_snapshots()
        self._given.append(kind)
        log.warning(
            "pressure: %s of %s of host memory are free, less than %s: the prefix cache gives up "
            "its %s there, up to %s",
            *told,
            *(kind, gib(self._kinds[kind])),
        )


def _least_bytes(room: HostRoom) -> int:
    """Return the free bytes below which host memory is short."""
    return min(MOST_LEAST, int(LEAST_SHARE * room.total_bytes))


class HostWatch:
    """Looks at host memory every second, in a thread of its own."""

    def __init__(self, call: Callable[[HostRoom], object]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headroom-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self._call(host_room())
            except Exception:
                log.exception("pressure: host memory is not watched any more")
                return
