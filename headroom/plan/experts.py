"""Routed experts in a plan: how many of each layer are hot, and the buffers for cold ones.

Which experts are hot is not decided here: `experts/placement.py` picks them by statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headroom.errors import OptionError, PlanError
from headroom.kernels.cuda.buffers import aligned
from headroom.kernels.cuda.experts_scratch import ExpertShape, experts_at_once
from headroom.plan.shape import BF16_BYTES, LayerShape
from headroom.units import MIB, gib, parse_size

STREAM_BUFFERS = 2  # of cold experts: one is read while the other is filled
# A larger buffer hides more of a layer's computing behind the link: 64 MiB take 1.2 ms over PCIe 5.
BUFFER_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class HotExperts:
    """How many experts of consecutive layers are hot, and their bytes."""

    counts: tuple[int, ...]  # by layer
    bytes: int
    staging: int = 0  # bytes of the buffers for cold experts; 0 where all are hot

    @property
    def total(self) -> int:
        """Hot experts of all layers."""
        return sum(self.counts)


def parse_expert_budget(text: str, expert_bytes: int) -> int:
    """Return the bytes that `8GiB` or `60%` allow for hot experts, at most all of them."""
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise OptionError(
                f"--expert-budget is {text!r}.",
                hint="Write 0% to 100%, or a size as 8GiB.",
                param="expert_budget",
            )
        return int(expert_bytes * percent / 100)
    if text.strip().isdecimal() and int(text):
        raise OptionError(
            f"--expert-budget is {text!r}, a number without a unit.",
            hint=f"Write {text.strip()}% or {text.strip()}GiB.",
            param="expert_budget",
        )
    return min(parse_size(text, "expert_budget"), expert_bytes)


def check_expert_budget(layers: Sequence[LayerShape], budget: int) -> None:
    """Refuse a budget that holds some experts and not as many as one token visits."""
    needed = floor_bytes(layers)
    if 0 < budget < needed:
        raise PlanError(
            f"{_floor(layers)} hot experts in each of {sum(bool(x.experts) for x in layers)} "
            f"layers need {gib(needed)} and the budget for experts is {gib(budget)}.",
            hint="Raise --expert-budget, or keep all experts cold with --expert-budget 0%.",
            param="expert_budget",
        )


def keep_experts(layers: Sequence[LayerShape], budget: int) -> HotExperts:
    """Return the experts that a budget keeps hot: none where it is below the floor."""
    hot = spread_experts(layers, budget)
    if hot.bytes < floor_bytes(layers):
        return HotExperts((0,) * len(layers), 0)
    return hot


def keep_with_staging(
    layers: Sequence[LayerShape], room: int, most: int, staging: int
) -> HotExperts:
    """Return the experts that fit: at most `most` bytes, in a room that also holds the staging."""
    total = sum(layer.all_expert_bytes for layer in layers)
    if total <= min(room, most):
        return HotExperts(tuple(layer.experts for layer in layers), total)
    return replace(keep_experts(layers, max(0, min(room - staging, most))), staging=staging)


def floor_bytes(layers: Sequence[LayerShape]) -> int:
    """Return the bytes of the fewest hot experts: in every layer as many as one token visits."""
    return _bytes(layers, _floor(layers))


def spread_experts(layers: Sequence[LayerShape], budget: int) -> HotExperts:
    """Return the most experts that a budget holds when every layer gets the same number.

    What is left goes to one more expert in layers whose experts are small, earlier ones first.
    """
    low, high = 0, max((layer.experts for layer in layers), default=0)
    while low < high:  # the largest number per layer that the budget holds
        middle = (low + high + 1) // 2
        if _bytes(layers, middle) <= budget:
            low = middle
        else:
            high = middle - 1
    counts = [min(low, layer.experts) for layer in layers]
    left = budget - _bytes(layers, low)
    order = sorted(range(len(layers)), key=lambda index: (layers[index].expert_bytes, index))
    for index in order:
        layer = layers[index]
        if counts[index] < layer.experts and layer.expert_bytes <= left:
            counts[index] += 1
            left -= layer.expert_bytes
    used = sum(count * layer.expert_bytes for count, layer in zip(counts, layers, strict=True))
    return HotExperts(tuple(counts), used)


def largest_expert(layers: Sequence[LayerShape]) -> int:
    """Return the bytes of the largest expert of some layers."""
    return max((layer.expert_bytes for layer in layers if layer.experts), default=0)


def buffer_bytes(expert_bytes: int, experts: int) -> int:
    """Return the bytes of one buffer: whole experts, at least one, at most all of a layer."""
    whole = min(experts, max(1, BUFFER_BYTES // expert_bytes)) * expert_bytes
    return aligned(whole)


def downs_bytes(experts: int, width: int, hidden: int, unpack_bytes: int) -> int:
    """Return the bytes of the unpacked down matrices of the experts computed together."""
    each = experts_at_once(experts, ExpertShape(width, hidden), unpack_bytes)
    return aligned(BF16_BYTES * each * width * hidden)


def expert_staging_bytes(layers: Sequence[LayerShape], hidden: int, unpack_bytes: int) -> int:
    """Return the GPU memory through which cold experts are copied for prefill and exchanges.

    It has two buffers, the unpacked down matrices of one group and one expert's room for an
    exchange. Layers have the sizes that kernels hold, padding included. Kernels that unpack nothing
    (`unpack_bytes` is 0) take one expert at a time.
    """
    spare = aligned(largest_expert(layers))
    if not unpack_bytes:
        return spare + spare
    return spare + _stream_bytes(layers, hidden, unpack_bytes)


def bounce_bytes(layers: Sequence[LayerShape]) -> int:
    """Return the pinned host memory through which unpinned experts are copied to a GPU."""
    most = max((layer.experts for layer in layers), default=0)
    return STREAM_BUFFERS * buffer_bytes(largest_expert(layers), most) if most else 0


def _stream_bytes(layers: Sequence[LayerShape], hidden: int, unpack_bytes: int) -> int:
    routed = [layer for layer in layers if layer.experts]
    if not routed:
        return 0
    most = max(layer.experts for layer in routed)
    downs = (
        downs_bytes(layer.experts, layer.expert_width, hidden, unpack_bytes) for layer in routed
    )
    return STREAM_BUFFERS * buffer_bytes(largest_expert(routed), most) + max(downs)


def _floor(layers: Sequence[LayerShape]) -> int:
    return max((layer.experts_used for layer in layers), default=0)


def _bytes(layers: Sequence[LayerShape], each: int) -> int:
    return sum(min(each, layer.experts) * layer.expert_bytes for layer in layers)
