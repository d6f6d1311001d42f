"""A store's experts change places as planned, layer by layer."""

from dataclasses import dataclass

from headroom.moe.placement import ExpertPlacement, LayerExperts
from headroom.moe.store_swaps import StoreSwaps
from headroom.moe.swap import SwapPolicy, apply_swaps, plan_swaps

LAYERS = (LayerExperts(0, 0), LayerExperts(2, 7), LayerExperts(3, 7))  # dense, all hot, some cold


@dataclass
class OneLayer:
    hot: set[int]
    expert_bytes: int = 11

    def exchange(self, promoted: int, demoted: int) -> None:
        self.hot = self.hot - {demoted} | {promoted}


class Store:
    def __init__(self, layer: OneLayer) -> None:
        self.layers = (None, None, layer)

    def residence(self) -> ExpertPlacement:
        layer = self.layers[2]
        assert layer is not None
        return ExpertPlacement(((), (0, 1), tuple(sorted(layer.hot))), "even")


def test_only_layers_with_cold_experts_change() -> None:
    swaps = StoreSwaps(Store(OneLayer({0})), LAYERS, same_bits=True)
    assert swaps.layers()[2] == LayerExperts(3, 11)  # as the store holds it
    planned = plan_swaps(
        swaps.placement(), [[], [0, 9], [0, 0, 9]], swaps.layers(), SwapPolicy(most_bytes=22)
    )
    assert apply_swaps(swaps, planned) == (1, None)
    assert swaps.placement().hot == ((), (0, 1), (2,))
