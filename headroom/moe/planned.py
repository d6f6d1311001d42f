"""planned_placement(): which experts are hot where a plan says how many."""

from headroom.memory.layout import DevicePlan
from headroom.moe.placement import Counts, ExpertPlacement, LayerExperts, place_experts
from headroom.moe.stats_file import StatsModel


def planned_placement(
    device: DevicePlan, model: StatsModel, counts: Counts | None
) -> ExpertPlacement:
    """Return the hot experts that a device's share of memory holds.

    The plan gives every layer the same number, since it knows no choices; with statistics the
    same bytes go where most choices are. No layer gets fewer than a token visits, or than the
    plan gave the layer that has fewest.
    """
    layers = model.layers
    hot = [0] * len(layers)
    first, last = device.layers
    hot[first : last + 1] = device.hot_by_layer or (0,) * (last + 1 - first)
    own = [
        layer if first <= index <= last else LayerExperts(0, 0)
        for index, layer in enumerate(layers)
    ]
    budget = sum(n * layer.expert_bytes for n, layer in zip(hot, own, strict=True))
    least = min((n for n, layer in zip(hot, own, strict=True) if layer.experts), default=0)
    if counts is not None:
        counts = [row[: layer.experts] for row, layer in zip(counts, own, strict=True)]
    return place_experts(own, counts, budget, min(least, max(model.used, default=0)))
