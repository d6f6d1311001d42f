"""ExpertPlacement: which experts are hot, chosen from routing statistics and a budget of bytes.

A placement can be saved to a file and loaded again. `measure_skew` measures how unevenly experts
are chosen: what statistics can gain at most.
"""

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from headroom.errors import FormatError, PlanError
from headroom.formats.atomic import replace_text
from headroom.formats.json_files import read_object
from headroom.units import counted, gib

RECORDS_VERSION = 1
# Even routing is added to the counts with the weight of so many tokens: it outweighs a short
# history and vanishes in a long one. With it the expected hit rate at 8 of 256 experts is at most
# 0.05 too high.
PRIOR_TOKENS = 512
# How often each expert was chosen, by layer and expert; the row of a dense layer is empty.
ExpertCounts = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The routed experts of one layer; a dense layer has none."""

    experts: int
    expert_bytes: int  # of each, in the format in which the device holds it
    used: int = 1  # experts that a token visits
    link_copies: int = 3  # times that an exchange sends an expert's bytes over the link

    @property
    def exchange_bytes(self) -> int:
        """The bytes that an exchange sends over the link, both ways together."""
        return self.link_copies * self.expert_bytes

    @property
    def prior(self) -> float:
        """The choices of this layer that even routing counts for."""
        return float(PRIOR_TOKENS * self.used)


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The hot experts of every layer; all others are cold."""

    hot: tuple[tuple[int, ...], ...]  # ids by layer, ascending
    source: str  # "even", "statistics" or the file that it was read from
    # The expected share of choices that are hot, by layer; empty without statistics.
    promised: tuple[float, ...] = field(default=(), compare=False)
    # Hot experts, by layer, that never give up their slots within steps; empty: none in any layer.
    pinned: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def total(self) -> int:
        """The number of hot experts of all layers."""
        return sum(len(ids) for ids in self.hot)

    def hit_rate(self, layer: int, experts: int) -> float:
        """Return the expected share of a layer's choices that are hot; the even one by default."""
        return self.promised[layer] if self.promised else len(self.hot[layer]) / experts

    def with_hit_rates(
        self, layers: Sequence[LayerExperts], counts: ExpertCounts
    ) -> "ExpertPlacement":
        """Return this placement with the hit rates expected from earlier choices.

        They are shrunk towards the even rate when few choices were counted.
        """
        return replace(self, promised=tuple(map(_hits, layers, self.hot, counts)))

    def with_pins(self, share: float, counts: ExpertCounts, least: Sequence[int]) -> Self:
        """Return this placement with the most chosen experts of a share of the slots pinned.

        `least` has the slots of each layer that stay free to change hands, if there are so many.
        """
        numbers = [
            max(0, min(int(share * len(ids)), len(ids) - floor))
            for ids, floor in zip(self.hot, least, strict=True)
        ]
        pinned = (
            tuple(sorted([expert for expert in ranked(row) if expert in ids][:number]))
            for ids, row, number in zip(map(set, self.hot), counts, numbers, strict=True)
        )
        return replace(self, pinned=tuple(pinned))

    def pinned_of(self, layer: int) -> tuple[int, ...]:
        """Return the experts of a layer that never give up their slots within steps."""
        return self.pinned[layer] if self.pinned else ()

    def hot_bytes(self, layers: Sequence[LayerExperts]) -> int:
        """Return the bytes of all hot experts."""
        return sum(
            len(ids) * layer.expert_bytes for ids, layer in zip(self.hot, layers, strict=True)
        )


def place_experts(
    layers: Sequence[LayerExperts], counts: ExpertCounts, budget: int, floor: int
) -> ExpertPlacement:
    """Return the hot experts that a budget of bytes holds, by statistics.

    Every layer with experts gets `floor` of them first. The rest of the budget goes to the experts
    with the most choices per byte; ties go to more choices, then to the layer with the smaller
    share of hot experts, then to the lower layer. Few choices move little: without any, all layers
    get the same share of their experts. A budget of 0 keeps all experts cold, whatever the floor.
    """
    check_counts(layers, counts)
    if budget == 0:
        return even_experts([0] * len(layers))
    needed = check_floor(layers, budget, floor)
    floors = [min(floor, layer.experts) for layer in layers]
    hot = _greedy(layers, counts, floors, budget - needed)
    return ExpertPlacement(hot, "statistics")


def even_experts(numbers: Sequence[int]) -> ExpertPlacement:
    """Return the placement without statistics: the first experts of each layer, so many."""
    return ExpertPlacement(tuple(tuple(range(number)) for number in numbers), "even")


def check_floor(layers: Sequence[LayerExperts], budget: int, floor: int) -> int:
    """Return the bytes of `floor` experts in each layer; refuse a budget below that.

    A budget of 0 is accepted: all experts are cold then.
    """
    floors = [min(floor, layer.experts) for layer in layers]
    needed = sum(n * layer.expert_bytes for n, layer in zip(floors, layers, strict=True))
    if needed > budget > 0:
        raise PlanError(
            f"{floor} hot experts in each of {sum(map(bool, floors))} layers need {gib(needed)} "
            f"and the budget for experts is {gib(budget)}.",
            hint="Raise --expert-budget, free memory with a smaller --context, "
            "or keep all experts cold with --expert-budget 0%.",
        )
    return needed


def _hits(layer: LayerExperts, hot: Sequence[int], counts: Sequence[float]) -> float:
    """Return the expected share of a layer's choices that its hot experts get.

    The share that was seen is too high, because the experts were made hot for it; so it is shrunk
    towards the even rate.
    """
    even = len(hot) / max(1, layer.experts)
    seen = sum(counts[expert] for expert in hot)
    return (seen + layer.prior * even) / max(1.0, sum(counts) + layer.prior)


def check_counts(layers: Sequence[LayerExperts], counts: ExpertCounts) -> None:
    """Refuse statistics that do not have the model's layers and numbers of experts."""
    found, wanted = [len(row) for row in counts], [layer.experts for layer in layers]
    if found != wanted:
        raise FormatError(
            f"The routing statistics are for {_described(found)}, the model has "
            f"{_described(wanted)}.",
            hint="Make new ones with headroom profile, or leave out --routing-stats.",
        )


def ranked(counts: Sequence[float]) -> list[int]:
    """Return the experts of a layer, the most chosen first; the lower id first on ties."""
    return sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))


def _greedy(
    layers: Sequence[LayerExperts], counts: ExpertCounts, floors: Sequence[int], left: int
) -> tuple[tuple[int, ...], ...]:
    orders = [ranked(row) for row in counts]
    taken = list(floors)
    sizes = [layer.expert_bytes for layer in layers if layer.experts]
    mean_bytes = max(1.0, sum(sizes) / max(1, len(sizes)))

    def bid(index: int) -> tuple[float, float, float, int]:
        layer = layers[index]
        count = counts[index][orders[index][taken[index]]]
        level = (taken[index] + 0.5) / layer.experts
        # The prior choices of even routing, `layer.prior` in all. The first experts of a layer get
        # 1.5 times their equal share of them and the last ones half of it. So layers with equal
        # counts fill up evenly, instead of some completely and others not beyond the floor. The
        # prior is divided by the mean size of all experts, so that without statistics layers with
        # small experts do not come first.
        prior = (1.5 - level) * layer.prior / layer.experts
        score = count / max(1, layer.expert_bytes) + prior / mean_bytes
        return -score, -count, level, index

    bids = [bid(index) for index, layer in enumerate(layers) if taken[index] < layer.experts]
    heapq.heapify(bids)
    while bids:
        index = heapq.heappop(bids)[-1]
        # A layer that does not fit now never will: its experts are all of one size.
        if layers[index].expert_bytes <= left:
            left -= layers[index].expert_bytes
            taken[index] += 1
            if taken[index] < layers[index].experts:
                heapq.heappush(bids, bid(index))
    return tuple(tuple(sorted(order[:number])) for order, number in zip(orders, taken, strict=True))


def save_placement(path: Path, placement: ExpertPlacement, identity: str) -> None:
    """Save a placement with the identity of its model."""
    table = {"version": RECORDS_VERSION, "model": identity, "hot": placement.hot}
    replace_text(path, json.dumps(table) + "\n")


def load_placement(path: Path, identity: str, layers: Sequence[LayerExperts]) -> ExpertPlacement:
    """Load a placement; refuse a file that is not of this model."""
    table = read_table(path, "placement", identity)
    hot = table.get("hot")
    if not isinstance(hot, list) or len(hot) != len(layers):
        found = f"{len(hot)} lists" if isinstance(hot, list) else "no lists"
        raise _wrong(path, f"it has {found} of hot experts, the model {len(layers)} layers")
    for index, (ids, layer) in enumerate(zip(hot, layers, strict=True)):
        numbers = isinstance(ids, list) and all(type(expert) is int for expert in ids)
        if not numbers or len(set(ids)) != len(ids):
            raise _wrong(path, f"the hot experts of layer {index} are not distinct numbers")
        if wrong := [expert for expert in ids if not 0 <= expert < layer.experts]:
            raise _wrong(path, f"layer {index} has {layer.experts} experts and no {wrong[0]}")
    return ExpertPlacement(tuple(tuple(sorted(ids)) for ids in hot), str(path))


def _wrong(path: Path, what: str) -> FormatError:
    return FormatError(
        f"{path} does not fit this model: {what}.",
        hint="Leave out --placement, and let --save-placement write a new file.",
    )


def read_table(path: Path, what: str, identity: str) -> Mapping[str, object]:
    """Return the JSON object of a file; refuse a file that is not of this model or version."""
    try:
        table = read_object(path)
        if table.get("version") != RECORDS_VERSION:
            raise ValueError(f"it has no version {RECORDS_VERSION}")
    except FileNotFoundError as error:
        raise FormatError(f"There is no {what} file {path}.", hint="Name another.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path} is not a {what} file: {error}.", hint="Name another, or a new one."
        ) from error
    if table.get("model") != identity:
        raise FormatError(
            f"{path} is of another model ({table.get('model')}, not {identity}).",
            hint="Name the file of this model, or a new one.",
        )
    return table


def _described(experts: Sequence[int]) -> str:
    return (
        f"{counted(len(experts), 'layer')} with {'/'.join(map(str, sorted(set(experts))))} experts"
    )


SHARES = (0.1, 0.3, 0.6)  # of a layer's experts, taken from the most chosen ones


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """How unevenly the experts of one layer are chosen."""

    layer: int
    experts: int
    choices: float
    top: tuple[float, ...]  # by SHARES: the share of choices that the most chosen experts get


def top_experts(experts: int, share: float) -> int:
    """Return how many experts a share of them is, at least one."""
    return max(1, round(share * experts))


def measure_skew(counts: Sequence[Sequence[float]]) -> list[LayerSkew]:
    """Return the skew of every layer with choices."""
    found = []
    for layer, row in enumerate(counts):
        total, ordered = sum(row), sorted(row, reverse=True)
        if total:
            top = tuple(sum(ordered[: top_experts(len(row), x)]) / total for x in SHARES)
            found.append(LayerSkew(layer, len(row), total, top))
    return found
