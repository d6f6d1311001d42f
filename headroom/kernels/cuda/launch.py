"""What the driver reads of a launch, at places that every launch of a thread uses again."""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_ARGUMENTS = 64
_MAY_START_EARLY = 6  # the driver's number of programmatic stream serialization
# Blocks, threads, bytes of shared memory, stream, attributes, how many of those.
_CONFIG = struct.Struct("@3I3IIPPI")
_SLOT_BYTES = 8

Argument = torch.Tensor | int | float | None


class Arguments:
    """A kernel's arguments, each in a slot of 64 bits, as the driver finds them.

    The driver has copied them when a launch returns, so that the next one may use the same slots;
    but that other threads may run until it has, so that each needs slots of its own.
    """

    def __init__(self) -> None:
        memory = bytearray(MOST_ARGUMENTS * _SLOT_BYTES)
        bytes_ = memoryview(memory)
        self._wide, self._ints, self._floats = bytes_.cast("Q"), bytes_.cast("i"), bytes_.cast("f")
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        slots = range(first, first + len(memory), _SLOT_BYTES)
        self.places = (ctypes.c_void_p * MOST_ARGUMENTS)(*slots)

    def fill(self, args: Sequence[Argument]) -> None:
        """Write tensors as pointers, None as a null pointer, ints and floats as 32 bits."""
        wide, ints = self._wide, self._ints
        argument: Any
        for at, argument in enumerate(args):
            kind = type(argument)  # exact types first: they are nearly all, and known soonest
            if kind is torch.Tensor:
                wide[at] = argument.data_ptr()
            elif kind is int:
                ints[2 * at] = argument  # refuses what has more than 32 bits
            elif argument is None:
                wide[at] = 0
            elif kind is float:
                self._floats[2 * at] = argument
            elif isinstance(argument, torch.Tensor):
                wide[at] = argument.data_ptr()
            elif isinstance(argument, int):
                ints[2 * at] = argument
            else:
                self._floats[2 * at] = argument


class Launch:
    """Arguments, and how the next kernel is launched."""

    def __init__(self) -> None:
        self.arguments = Arguments()
        self._memory = ctypes.create_string_buffer(_CONFIG.size)
        self.config = ctypes.byref(self._memory)
        attribute = struct.pack("@iii60x", _MAY_START_EARLY, 0, 1)  # 64 bytes are its value
        self._attribute = ctypes.create_string_buffer(attribute, len(attribute))
        self._attribute_at = ctypes.addressof(self._attribute)

    def set(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        stream: int,
        early: bool,
    ) -> None:
        """Write how the next kernel is launched."""
        sizes = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        _CONFIG.pack_into(self._memory, 0, *sizes, shared_bytes, stream, self._attribute_at, early)


class OwnLaunch(threading.local):
    """Every thread's own launch."""

    def __init__(self) -> None:
        self.launch = Launch()


def _slow_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# What torch's own functions ask, without their checks: these run for every kernel of a step.
stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
