"""The plan says how many experts are hot, the placement says which."""

from pathlib import Path

from headroom.memory.layout import DevicePlan
from headroom.moe.placement import LayerExperts
from headroom.moe.planned import planned_placement
from headroom.moe.stats_file import StatsModel

MODEL = StatsModel(
    Path("m.gguf"),
    "abc",
    (LayerExperts(0, 0), LayerExperts(4, 10), LayerExperts(4, 10)),
    (0, 1, 1),
)


def device(layers: tuple[int, int], hot: tuple[int, ...]) -> DevicePlan:
    return DevicePlan(
        name="cuda:0",
        kind="cuda",
        total_bytes=1000,
        lines=(),
        layers=layers,
        hot_by_layer=hot,
        total_experts=8,
    )


def test_without_statistics_the_placement_is_the_plans() -> None:
    placed = planned_placement(device((0, 2), (0, 2, 2)), MODEL, None)
    assert (placed.hot, placed.source) == (((), (0, 1), (0, 1)), "even")


def test_statistics_move_the_same_bytes_to_where_choices_are() -> None:
    counts = ((), (0.0, 9.0, 8.0, 7.0), (0.0, 0.0, 1.0, 0.0))
    placed = planned_placement(device((0, 2), (0, 2, 2)), MODEL, counts)
    assert (placed.hot, placed.source) == (((), (1, 2, 3), (2,)), "statistics")


def test_a_device_holds_experts_of_its_own_layers_only() -> None:
    counts = ((), (9.0, 9.0, 9.0, 9.0), (0.0, 0.0, 0.0, 1.0))
    placed = planned_placement(device((2, 2), (2,)), MODEL, counts)
    assert placed.hot == ((), (), (0, 3))


def test_no_room_is_no_hot_expert() -> None:
    counts = ((), (9.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))
    assert planned_placement(device((0, 2), (0, 0, 0)), MODEL, counts).total == 0
