"""Staging: GPU memory through which cold experts pass on their way to products of many rows."""

from collections.abc import Sequence

from headroom.kernels.cuda.sizes import experts_at_once
from headroom.plan.device_scratch import BF16
from headroom.plan.experts import aligned, largest_expert
from headroom.plan.shape import LayerShape
from headroom.units import MIB

BUFFERS = 2  # one is read while the other is filled
# More hides more of a layer's computing behind the link: 64 MiB pass a PCIe 5 link in 1.2 ms.
BUFFER_BYTES = 64 * MIB


def buffer_bytes(expert_bytes: int, experts: int) -> int:
    """Return the bytes of one buffer: whole experts, at least one, at most all of a layer."""
    whole = min(experts, max(1, BUFFER_BYTES // expert_bytes)) * expert_bytes
    return aligned(whole)


def downs_bytes(experts: int, width: int, hidden: int, unpack_bytes: int) -> int:
    """Return the bytes of a group's unpacked downs: a cold expert is unpacked as a whole."""
    each = experts_at_once(experts, width, hidden, unpack_bytes)
    return aligned(BF16 * each * width * hidden)


def expert_staging_bytes(layers: Sequence[LayerShape], hidden: int, unpack_bytes: int) -> int:
    """Return what a GPU with cold experts needs for those on their way to it.

    Layers are as its kernels hold them, padding included; room for one expert that changes places
    is in. Kernels that unpack nothing (`unpack_bytes` is 0) take one expert at a time.
    """
    spare = aligned(largest_expert(layers))
    if not unpack_bytes:
        return spare + spare
    return spare + _stream_bytes(layers, hidden, unpack_bytes)


def bounce_bytes(layers: Sequence[LayerShape]) -> int:
    """Return the pinned host memory between experts that are not pinned and a GPU's buffers."""
    most = max((layer.experts for layer in layers), default=0)
    return BUFFERS * buffer_bytes(largest_expert(layers), most) if most else 0


def _stream_bytes(layers: Sequence[LayerShape], hidden: int, unpack_bytes: int) -> int:
    routed = [layer for layer in layers if layer.experts]
    if not routed:
        return 0
    most = max(layer.experts for layer in routed)
    downs = (
        downs_bytes(layer.experts, layer.expert_width, hidden, unpack_bytes) for layer in routed
    )
    return BUFFERS * buffer_bytes(largest_expert(routed), most) + max(downs)
