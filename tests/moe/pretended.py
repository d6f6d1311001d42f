"""Experts that only note where they are: they change places, and read nothing."""

from collections.abc import Sequence

from headroom.moe.placement import ExpertPlacement, LayerExperts
from headroom.moe.telemetry import ColdFigures


class PretendedExperts:
    """Fills Swappable and ColdMeter without any weights."""

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        hot: Sequence[Sequence[int]],
        *,
        same_bits: bool = False,
        fails_after: int | None = None,  # exchanges
    ) -> None:
        self._layers = list(layers)
        self._hot = [set(ids) for ids in hot]
        self.same_bits = same_bits
        self.fails_after = fails_after
        self.exchanged: list[tuple[int, int, int]] = []
        self.pick_bytes = ()

    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(tuple(tuple(sorted(ids)) for ids in self._hot), "even")

    def layers(self) -> Sequence[LayerExperts]:
        return self._layers

    def exchange(self, layer: int, promoted: int, demoted: int) -> None:
        if len(self.exchanged) == self.fails_after:
            raise RuntimeError("the copy failed")
        assert promoted not in self._hot[layer]
        self._hot[layer].remove(demoted)
        self._hot[layer].add(promoted)
        self.exchanged.append((layer, promoted, demoted))

    def figures(self) -> ColdFigures:
        sizes = {"gpu": 1000 * len(self.exchanged), "cpu": 0}
        return ColdFigures(sizes, {"hot": 0.5, "cold": 0.25, "wait": 0.0})
