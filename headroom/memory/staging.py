"""Staging: GPU memory through which cold experts pass on their way to products of many rows."""

from collections.abc import Sequence

from headroom.kernels.cuda.sizes import ALIGNMENT, experts_at_once
from headroom.memory.device_scratch import BF16
from headroom.memory.shape import LayerShape
from headroom.units import MIB

BUFFERS = 2  # one is read while the other is filled
# More hides more of a layer's computing behind the link: 64 MiB pass a PCIe 5 link in 1.2 ms.
BUFFER_BYTES = 64 * MIB


def buffer_bytes(expert_bytes: int) -> int:
    """Return the bytes of one buffer: whole experts, at least one."""
    whole = max(1, BUFFER_BYTES // expert_bytes) * expert_bytes
    return -(-whole // ALIGNMENT) * ALIGNMENT


def downs_bytes(experts: int, width: int, hidden: int, unpack_bytes: int) -> int:
    """Return the bytes of a group's unpacked downs: a cold expert is unpacked as a whole."""
    each = experts_at_once(experts, width, hidden, unpack_bytes)
    return -(-BF16 * each * width * hidden // ALIGNMENT) * ALIGNMENT


def staging_bytes(layers: Sequence[LayerShape], hidden: int, unpack_bytes: int) -> int:
    """Return what a GPU needs beside its scratch to stream cold experts of these layers.

    Layers are as its kernels hold them, padding included.
    """
    routed = [layer for layer in layers if layer.experts]
    if not routed:
        return 0
    largest = max(layer.expert_bytes for layer in routed)
    downs = (
        downs_bytes(layer.experts, layer.expert_width, hidden, unpack_bytes) for layer in routed
    )
    return BUFFERS * buffer_bytes(largest) + max(downs)
