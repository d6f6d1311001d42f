"""StoreSwaps: the experts of a store as swaps see them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from headroom.experts.copies import Mark
from headroom.experts.placement import ExpertPlacement, LayerExperts


class StoredLayer(Protocol):
    """What swaps need of one layer's store."""

    @property
    def expert_bytes(self) -> int: ...

    @property
    def link_copies(self) -> int: ...  # of an expert that an exchange sends over the link

    @property
    def exchange_mark(self) -> Mark: ...  # when the copies are there that were asked for

    def begin_exchange(self, promoted: int, demoted: int) -> None: ...

    def turn_exchange(self) -> None: ...

    def end_exchange(self) -> None: ...


class Stored(Protocol):
    """What swaps need of the store of a whole model."""

    @property
    def layers(self) -> "Sequence[StoredLayer | None]": ...  # None: dense, or all hot

    def residence(self) -> ExpertPlacement: ...  # as it is now


class StoreSwaps:
    """Fills Swappable."""

    def __init__(
        self,
        store: Stored,
        layers: Sequence[LayerExperts],
        *,
        same_bits: bool,  # whether hot and cold experts give the same
    ) -> None:
        self._store, self.same_bits = store, same_bits
        self._changing: StoredLayer | None = None  # the layer of the exchange that was begun last
        self._layers = tuple(
            layer if stored is None else _as_stored(layer, stored)
            for layer, stored in zip(layers, store.layers, strict=True)
        )

    def placement(self) -> ExpertPlacement:
        """Return which experts are hot now."""
        return self._store.residence()

    def layers(self) -> Sequence[LayerExperts]:
        """Return all layers with the bytes that their experts have in the store."""
        return self._layers

    def begin(self, layer: int, promoted: int, demoted: int) -> None:
        """Ask for the copies of two experts of a layer."""
        self._changing = self._store.layers[layer]
        self._layer.begin_exchange(promoted, demoted)

    def ready(self) -> bool:
        """Tell whether the copies are there that were asked for last."""
        return self._layer.exchange_mark.query()

    def wait(self) -> None:
        """Wait for them."""
        self._layer.exchange_mark.synchronize()

    def turn(self) -> None:
        """Let the two change sides and ask for copies to their places."""
        self._layer.turn_exchange()

    def end(self) -> None:
        """Let them be at their places."""
        self._layer.end_exchange()

    @property
    def _layer(self) -> StoredLayer:
        assert self._changing is not None, "only layers with cold experts change"
        return self._changing


def _as_stored(layer: LayerExperts, stored: StoredLayer) -> LayerExperts:
    return replace(layer, expert_bytes=stored.expert_bytes, swap_copies=stored.link_copies)
