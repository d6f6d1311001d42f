"""Placement: the budget is kept, the floor is kept, and statistics decide the rest."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError, PlanError
from headroom.experts import placement as placement_module
from headroom.experts.placement import (
    ExpertPlacement,
    LayerExperts,
    load_placement,
    measure_skew,
    place_experts,
    save_placement,
)

Problem = tuple[list[LayerExperts], list[list[int]], int, int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Layers, dense ones among them, their counts, a budget and a floor that it holds."""
    layers = draw(
        st.lists(
            st.builds(LayerExperts, st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=6
        )
    )
    counts = [
        draw(st.lists(st.integers(0, 5), min_size=layer.experts, max_size=layer.experts))
        for layer in layers
    ]
    floor = draw(st.integers(0, 4))
    least = sum(min(floor, layer.experts) * layer.expert_bytes for layer in layers)
    return layers, counts, least + draw(st.integers(0, 800)), floor


@given(problems())
def test_a_placement_keeps_its_budget_and_its_floor_and_wastes_no_room(problem: Problem) -> None:
    layers, counts, budget, floor = problem
    placement = place_experts(layers, counts, budget, floor)
    left = budget - placement.hot_bytes(layers)
    assert left >= 0
    for ids, layer in zip(placement.hot, layers, strict=True):
        assert len(set(ids)) == len(ids)
        assert all(0 <= expert < layer.experts for expert in ids)
        if budget:
            assert len(ids) >= min(floor, layer.experts)
            assert len(ids) == layer.experts or layer.expert_bytes > left


@given(problems())
def test_within_a_layer_no_cold_expert_was_chosen_more_often_than_a_hot_one(
    problem: Problem,
) -> None:
    layers, counts, budget, floor = problem
    placement = place_experts(layers, counts, budget, floor)
    for ids, row in zip(placement.hot, counts, strict=True):
        cold = [row[expert] for expert in range(len(row)) if expert not in ids]
        assert not ids or not cold or max(cold) <= min(row[expert] for expert in ids)


@given(problems(), st.randoms())
def test_renumbered_experts_are_placed_alike(problem: Problem, random: object) -> None:
    layers, counts, budget, floor = problem
    # Equal counts are told apart by id, so that only distinct ones can be compared.
    counts = [[10 * count + i for i, count in enumerate(row)] for row in counts]
    orders = [list(range(len(row))) for row in counts]
    for order in orders:
        random.shuffle(order)  # type: ignore[attr-defined]
    moved = [[row[i] for i in order] for row, order in zip(counts, orders, strict=True)]
    plain = place_experts(layers, counts, budget, floor)
    renumbered = place_experts(layers, moved, budget, floor)
    back = tuple(
        tuple(sorted(order[expert] for expert in ids))
        for ids, order in zip(renumbered.hot, orders, strict=True)
    )
    assert back == plain.hot


def test_the_most_choices_per_byte_are_hot() -> None:
    layers = [LayerExperts(4, 1)] * 2
    placement = place_experts(layers, [[100, 80, 60, 40], [100, 1, 1, 1]], 4, 1)
    assert placement.hot == ((0, 1, 2), (0,))


def test_of_equally_chosen_experts_of_a_layer_the_lower_ids_are_hot() -> None:
    assert place_experts([LayerExperts(5, 1)], [[3, 7, 3, 7, 3]], 3, 0).hot == ((0, 1, 3),)


def test_without_choices_layers_fill_evenly_and_the_lower_layer_gets_the_odd_expert() -> None:
    layers = [LayerExperts(4, 1)] * 3
    for budget, numbers in ((1, (1, 0, 0)), (4, (2, 1, 1)), (5, (2, 2, 1)), (7, (3, 2, 2))):
        hot = place_experts(layers, [[0] * 4] * 3, budget, 0).hot
        assert tuple(map(len, hot)) == numbers
        assert all(ids == tuple(range(len(ids))) for ids in hot)


@pytest.mark.parametrize(
    ("layers", "counts", "budget", "floor", "hot"),
    [
        # As many choices a byte: the expert with more choices comes first.
        ([(2, 10), (2, 20)], [[4, 0], [8, 0]], 20, 0, ((), (0,))),
        ([(2, 20), (2, 10)], [[8, 0], [4, 0]], 20, 0, ((0,), ())),
        ([(4, 20), (8, 10)], [[8, 8, 0, 0], [4, 4, 0, 0, 0, 0, 0, 0]], 50, 1, ((0, 1), (0,))),
        # As many choices and bytes: the layer with the smaller share of hot experts comes first.
        ([(4, 10), (8, 10)], [[5, 5, 0, 0], [5, 5, 0, 0, 0, 0, 0, 0]], 30, 1, ((0,), (0, 1))),
        ([(8, 10), (4, 10)], [[5, 5, 0, 0, 0, 0, 0, 0], [5, 5, 0, 0]], 30, 1, ((0, 1), (0,))),
        # On ties the lower layer comes first.
        ([(4, 10), (4, 10)], [[5, 5, 0, 0], [5, 5, 0, 0]], 30, 1, ((0, 1), (0,))),
    ],
    ids=[
        "choices",
        "choices, other order",
        "choices before share",
        "share",
        "share, other order",
        "layer",
    ],
)
def test_ties_between_layers_go_by_choices_then_by_the_hot_share_then_by_the_layer(
    layers: list[tuple[int, int]],
    counts: list[list[int]],
    budget: int,
    floor: int,
    hot: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Even routing counts for nothing here: it would break the ties.
    monkeypatch.setattr(placement_module, "PRIOR_TOKENS", 0)
    found = place_experts([LayerExperts(*layer) for layer in layers], counts, budget, floor)
    assert found.hot == hot


def test_a_budget_of_nothing_keeps_all_experts_cold() -> None:
    assert place_experts([LayerExperts(2, 3)], [[1, 2]], 0, 4).total == 0


def test_a_budget_below_the_floor_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError) as refused:
        place_experts([LayerExperts(256, 1 << 20)] * 40, [[1] * 256] * 40, 100 << 20, 8)
    assert str(refused.value) == (
        "8 hot experts in each of 40 layers need 320.0 MiB and the budget for experts is "
        "100.0 MiB. Raise --expert-budget, free memory with a smaller --context, or keep "
        "all experts cold with --expert-budget 0%."
    )


LAYERS = [LayerExperts(4, 10), LayerExperts(0, 0), LayerExperts(4, 10)]


def test_a_saved_placement_is_read_again(tmp_path: Path) -> None:
    placement = ExpertPlacement(((0, 3), (), (1,)), "statistics")
    save_placement(tmp_path / "p.json", placement, "abc")
    found = load_placement(tmp_path / "p.json", "abc", LAYERS)
    assert found.hot == placement.hot
    assert found.source == str(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"version": 2}, "is not a placement file: it has no version 1"),
        ({"model": "other"}, "is of another model (other, not abc)"),
        ({"hot": [[0]]}, "it has 1 lists of hot experts, the model 3 layers. Leave out"),
        ({"hot": 3}, "it has no lists of hot experts, the model 3 layers"),
        ({"hot": [[0, 0], [], []]}, "layer 0 are not distinct numbers"),
        ({"hot": [[0], [], ["1"]]}, "layer 2 are not distinct numbers"),
        ({"hot": [[0], [], [4]]}, "layer 2 has 4 experts and no 4"),
        ({"hot": [[0], [0], []]}, "layer 1 has 0 experts and no 0"),
    ],
)
def test_a_placement_of_something_else_is_refused(
    tmp_path: Path, table: dict[str, object], text: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"version": 1, "model": "abc", "hot": [[0], [], []], **table}))
    with pytest.raises(FormatError) as refused:
        load_placement(path, "abc", LAYERS)
    assert text in str(refused.value)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(FormatError, match="is not a placement file"):
        load_placement(tmp_path / "p.json", "abc", LAYERS)


def test_the_most_chosen_experts_are_counted_wherever_they_stand() -> None:
    row = [1.0, 50.0, 1.0, 20.0, 1.0, 20.0, 1.0, 3.0, 2.0, 1.0]
    (found,) = measure_skew([[], row, [0.0] * 10])
    assert (found.layer, found.experts, found.choices) == (1, 10, 100.0)
    assert found.top == pytest.approx((0.5, 0.9, 0.96))


def test_even_choices_have_no_skew() -> None:
    (found,) = measure_skew([[7.0] * 16])
    assert found.top == pytest.approx((2 / 16, 5 / 16, 10 / 16))


def test_a_share_is_one_expert_at_least() -> None:
    (found,) = measure_skew([[3.0, 1.0]])
    assert found.top == pytest.approx((0.75, 0.75, 0.75))


def test_the_most_chosen_of_the_hot_experts_are_pinned_and_some_slots_stay_free() -> None:
    placement = ExpertPlacement(((), (0, 2, 3, 5, 6, 7), (1, 2)), "statistics")
    counts = [(), (1.0, 99.0, 4.0, 8.0, 99.0, 8.0, 0.0, 2.0), (0.0, 5.0, 6.0)]
    pinned = placement.with_pins(0.5, counts, [0, 2, 2])
    assert pinned.pinned == ((), (2, 3, 5), ())
    assert [pinned.pinned_of(layer) for layer in range(3)] == [*pinned.pinned]
    assert placement.with_pins(1.0, counts, [0, 4, 0]).pinned == ((), (3, 5), (1, 2))
    assert placement.pinned_of(1) == ()
