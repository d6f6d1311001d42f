"""Launch parameters in the driver's format, in memory that all launches of a thread reuse."""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_ARGUMENTS = 64
_MAY_START_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# Blocks, threads, bytes of shared memory, stream, attributes, number of attributes.
_CONFIG = struct.Struct("@3I3IIPPI")
_SLOT_BYTES = 8

Argument = torch.Tensor | int | float | None


class Arguments:
    """A kernel's arguments as the driver reads them, each in a slot of 64 bits.

    The driver has copied the arguments when a launch returns, so the next launch of the thread may
    use the same slots. Each thread has its own, since threads may launch at the same time.
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
            kind = type(argument)  # exact types first: nearly all arguments, and the fastest test
            if kind is torch.Tensor:
                wide[at] = argument.data_ptr()
            elif kind is int:
                ints[2 * at] = argument  # raises if it has more than 32 bits
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
    """The arguments, and the launch configuration of the next kernel."""

    def __init__(self) -> None:
        self.arguments = Arguments()
        self._memory = ctypes.create_string_buffer(_CONFIG.size)
        self.config = ctypes.byref(self._memory)
        attribute = struct.pack("@iii60x", _MAY_START_EARLY, 0, 1)  # its value has 64 bytes
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
        """Write the launch configuration of the next kernel."""
        sizes = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        _CONFIG.pack_into(self._memory, 0, *sizes, shared_bytes, stream, self._attribute_at, early)


class OwnLaunch(threading.local):
    """One `Launch` per thread."""

    def __init__(self) -> None:
        self.launch = Launch()


def _slow_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The functions behind torch's public ones, without their checks: they run for every kernel.
stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
