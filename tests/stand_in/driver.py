"""The functions of NVIDIA's driver that the engine calls, for the stand-in GPU."""
# ruff: noqa: N802 -- the names are the driver's

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from tests.stand_in.streams import Queues, StandInError

_ERRORS: Mapping[int, str] = {1: "a copy is refused", 2: "out of memory"}


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was asked for."""

    to: int  # address
    source: int  # address
    bytes: int


class Driver:
    """Stands in for `libcuda`: pins memory, and copies on the streams of a GPU.

    Names, arguments and results are the driver's own.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.pinned: dict[int, int] = {}  # bytes by address
        self.copies: list[Copy] = []  # in the order in which they were asked for

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: object, number: int) -> int:
        return 0

    def cuCtxGetDevice(self, device: object) -> int:
        return 0  # the number of the first GPU, which an int is when it is made

    def cuMemHostRegister_v2(
        self, address: ctypes.c_void_p, size: ctypes.c_size_t, flags: int
    ) -> int:
        if self._queues.refuses_to_pin:
            return 2
        assert address.value not in self.pinned
        self.pinned[address.value or 0] = size.value
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:
        del self.pinned[address.value or 0]
        return 0

    def cuMemcpyAsync(
        self,
        to: ctypes.c_void_p,
        source: ctypes.c_void_p,
        size: ctypes.c_size_t,
        stream: ctypes.c_void_p,
    ) -> int:
        at, first, count = to.value or 0, source.value or 0, size.value
        try:
            self._queues.copy(
                self._queues.streams[stream.value or 0],
                at,
                lambda: ctypes.memmove(at, first, count),
                lambda: ctypes.memset(at, 0xFF, count),
            )
        except StandInError:
            return 1
        self.copies.append(Copy(at, first, count))
        return 0

    def refuse_to_pin(self) -> None:
        """Let no more host memory be pinned."""
        self._queues.refuses_to_pin = True

    def cuGetErrorString(self, status: int, text: object) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = _ERRORS[status].encode()
        return 0
