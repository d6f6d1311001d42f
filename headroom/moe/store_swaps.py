"""StoreSwaps: the experts of a store as swaps see them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from headroom.moe.placement import ExpertPlacement, LayerExperts


class StoredLayer(Protocol):
    """What swaps need of one layer's store."""

    @property
    def expert_bytes(self) -> int: ...

    def exchange(self, promoted: int, demoted: int) -> None: ...


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
        self._layers = tuple(
            layer if stored is None else replace(layer, expert_bytes=stored.expert_bytes)
            for layer, stored in zip(layers, store.layers, strict=True)
        )

    def placement(self) -> ExpertPlacement:
        """Return which experts are hot now."""
        return self._store.residence()

    def layers(self) -> Sequence[LayerExperts]:
        """Return all layers with the bytes that their experts have in the store."""
        return self._layers

    def exchange(self, layer: int, promoted: int, demoted: int) -> None:
        """Let two experts of a layer change places."""
        stored = self._store.layers[layer]
        assert stored is not None, f"layer {layer} has no cold experts"
        stored.exchange(promoted, demoted)
