"""Experts that only note where they are: they change places, and read nothing."""

from collections.abc import Sequence
from dataclasses import replace

from headroom.experts.exchange import Exchange
from headroom.experts.placement import ExpertPlacement, LayerExperts
from headroom.experts.telemetry import ColdFigures


def swapped(placement: ExpertPlacement, swaps: Sequence[Exchange]) -> ExpertPlacement:
    """The placement after exchanges; as many experts of each layer are hot as before."""
    hot = [set(ids) for ids in placement.hot]
    for swap in swaps:
        hot[swap.layer].remove(swap.demoted)
        hot[swap.layer].add(swap.promoted)
    return replace(placement, hot=tuple(tuple(sorted(ids)) for ids in hot))


class PretendedExperts:
    """Fills StoreExchanges and ColdMeter without any weights."""

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        hot: Sequence[Sequence[int]],
        *,
        same_bits: bool = False,
        fails_after: int | None = None,  # exchanges
        fails_in: str = "turn",  # or "begin", "ready", "end"; "move": when sides have changed
        slow: int = 0,  # times that copies are asked for in vain
    ) -> None:
        self._layers = list(layers)
        self._hot = [set(ids) for ids in hot]
        self.same_bits = same_bits
        self.fails_after, self.fails_in = fails_after, fails_in
        self.slow, self._late = slow, 0
        self._now: tuple[int, int, int] | None = None
        self._turned = False
        self.begun: list[tuple[int, int, int]] = []
        self.exchanged: list[tuple[int, int, int]] = []
        self.waits = 0  # for copies that were not there
        self.pick_bytes = ()

    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(tuple(tuple(sorted(ids)) for ids in self._hot), "even")

    def layers(self) -> Sequence[LayerExperts]:
        return self._layers

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        assert not self._turned  # or its experts would stay in the spare buffers
        self._check("begin")
        assert promoted not in self._hot[layer]
        assert demoted in self._hot[layer]
        self._now, self._late = (layer, promoted, demoted), self.slow
        self.begun.append(self._now)

    def ready(self) -> bool:
        self._check("ready")
        self._late -= 1
        return self._late < 0

    def wait(self) -> None:
        self.waits += self._late > 0
        self._late = 0

    def turn(self) -> None:
        assert self._now is not None
        assert not self._turned
        self.wait()
        self._check("turn", "ready")
        layer, promoted, demoted = self._now
        self._hot[layer].remove(demoted)
        self._hot[layer].add(promoted)
        self._turned, self._late = True, self.slow
        self._check("move")

    def end(self) -> None:
        assert self._now is not None
        assert self._turned
        self.wait()
        self._check("end")
        self.exchanged.append(self._now)
        self._now, self._turned = None, False

    def _check(self, *where: str) -> None:
        if len(self.exchanged) == self.fails_after and self.fails_in in where:
            raise RuntimeError("the copy failed")

    def figures(self) -> ColdFigures:
        sizes = {"gpu": 1000 * len(self.exchanged), "cpu": 0}
        return ColdFigures(sizes, {"hot": 0.5, "cold": 0.25, "wait": 0.0})
