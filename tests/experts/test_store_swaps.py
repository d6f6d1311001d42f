"""A store's experts change places as planned, layer by layer."""

from dataclasses import dataclass

from headroom.experts.copies import HostCopies, Mark
from headroom.experts.exchange import StoreSwaps, SwapPolicy, plan_swaps
from headroom.experts.placement import ExpertPlacement, LayerExperts

LAYERS = (LayerExperts(0, 0), LayerExperts(2, 7), LayerExperts(3, 7))  # dense, all hot, some cold


@dataclass
class OneLayer:
    hot: set[int]
    expert_bytes: int = 11
    link_copies: int = 1
    told: tuple[object, ...] = ()

    @property
    def exchange_mark(self) -> Mark:
        return HostCopies().mark()

    def begin_exchange(self, promoted: int, demoted: int) -> None:
        self.told += ("begin",)
        self.pair = promoted, demoted

    def turn_exchange(self) -> None:
        self.told += ("turn",)
        promoted, demoted = self.pair
        self.hot = self.hot - {demoted} | {promoted}

    def end_exchange(self) -> None:
        self.told += ("end",)


class Store:
    def __init__(self, layer: OneLayer) -> None:
        self.layers = (None, None, layer)

    def residence(self) -> ExpertPlacement:
        layer = self.layers[2]
        assert layer is not None
        return ExpertPlacement(((), (0, 1), tuple(sorted(layer.hot))), "even")


def test_only_layers_with_cold_experts_change() -> None:
    layer = OneLayer({0})
    swaps = StoreSwaps(Store(layer), LAYERS, same_bits=True)
    assert swaps.layers()[2] == LayerExperts(3, 11, swap_copies=1)  # as the store holds it
    planned = plan_swaps(
        swaps.placement(), [[], [0, 9], [0, 0, 9]], swaps.layers(), SwapPolicy(most_bytes=11)
    )
    assert len(planned) == 1
    swaps.begin(planned[0].layer, planned[0].promoted, planned[0].demoted)
    assert swaps.ready()
    swaps.turn()
    swaps.wait()
    swaps.end()
    assert layer.told == ("begin", "turn", "end")
    assert swaps.placement().hot == ((), (0, 1), (2,))
