"""Spans: contiguous layer ranges for devices, by given weights or by balance."""

import math
from collections.abc import Sequence

from headroom.errors import OptionError, PlanError

Span = tuple[int, int]  # first and last layer


def parse_split(text: str, devices: int) -> tuple[float, ...]:
    """Return the shares that `2,1` stands for, one for each device."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or any(not math.isfinite(share) or share <= 0 for share in shares):
        raise OptionError(
            f"--split is {text!r}.", hint="Write positive numbers, as in 2,1.", param="split"
        )
    if len(shares) != devices:
        raise OptionError(
            f"--split has {len(shares)} shares for {devices} devices.",
            hint="Write one share for each device.",
            param="split",
        )
    return shares


def split_by_weights(layers: int, weights: Sequence[float]) -> tuple[Span, ...]:
    """Return one span for each weight, in proportion, each with at least one layer."""
    count, total = len(weights), sum(weights)
    check_device_count(layers, count)
    spans, first, reached = [], 0, 0.0
    for index, weight in enumerate(weights):
        reached += weight
        end = layers if index == count - 1 else math.floor(reached / total * layers + 0.5)
        end = min(max(end, first + 1), layers - (count - index - 1))
        spans.append((first, end - 1))
        first = end
    return tuple(spans)


def split_by_balance(costs: Sequence[int], rooms: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans whose fullest device is as little filled as can be.

    `costs` are bytes of layers, `rooms` bytes of devices.
    """
    check_device_count(len(costs), len(rooms))
    rooms = [max(1, room) for room in rooms]
    low, high = 0.0, sum(costs) / min(rooms) + 1.0  # at `high` any one device holds everything
    best = _fill(costs, rooms, high)
    assert best is not None
    for _ in range(40):
        middle = (low + high) / 2
        found = _fill(costs, rooms, middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def split_by_filling(
    costs: Sequence[int], rooms: Sequence[int], *, backwards: bool = False
) -> tuple[Span, ...] | None:
    """Return the spans that fill the first devices (or the last) and leave the others the rest.

    None where the devices do not hold all layers.
    """
    check_device_count(len(costs), len(rooms))
    if not backwards:
        return _fill(costs, rooms, 1.0)
    found = _fill(costs[::-1], rooms[::-1], 1.0)
    last = len(costs) - 1
    return found and tuple((last - end, last - first) for first, end in reversed(found))


def check_device_count(layers: int, devices: int) -> None:
    """Refuse more devices than layers."""
    if not 0 < devices <= layers:
        raise PlanError(
            f"{devices} devices cannot share {layers} layers.",
            hint=f"Name 1 to {layers} devices.",
        )


def _fill(costs: Sequence[int], rooms: Sequence[int], share: float) -> tuple[Span, ...] | None:
    """Fill each device up to `share` of its room, in order; None if layers are left over."""
    spans, first = [], 0
    for index, room in enumerate(rooms):
        most_end = len(costs) - (len(rooms) - index - 1)  # each later device needs a layer
        end, load = first, 0
        while end < most_end and load + costs[end] <= share * room:
            load += costs[end]
            end += 1
        if end == first:
            return None
        spans.append((first, end - 1))
        first = end
    return tuple(spans) if first == len(costs) else None
