"""The functions of NVIDIA's driver that the engine calls, for the stand-in GPU."""
# ruff: noqa: N802 -- the names are the driver's

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.stand_in.streams import Queues, StandInError

_ERRORS: Mapping[int, str] = {
    1: "a copy is refused",
    2: "out of memory",
    101: "invalid device",
    209: "no kernel image is available",
    500: "not found",
    701: "too many resources",
}
NO_CONTEXT = 201  # status of a thread that has no GPU's context
_CONTEXT, _MODULE, _FUNCTION = 7000, 5000, 6000  # handles begin at these numbers


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver's header."""

    _fields_ = (("number", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver's header."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was asked for."""

    to: int  # address
    source: int  # address
    bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that was started, as the driver reads its arguments and its configuration."""

    function: int  # handle
    values: list[int | float]  # arguments
    grid: list[int]
    block: list[int]
    shared_bytes: int
    stream: int | None  # handle
    attributes: list[tuple[int, list[int]]]


class Driver:
    """Stands in for `libcuda`: pins memory, copies on streams, loads code, reads launches.

    Names, arguments and results are the driver's own. Kernels that are started here do not run.
    """

    def __init__(self, queues: Queues, gpus: int = 1) -> None:
        self.queues = queues
        self._gpus = gpus
        self.current: int | None = 0  # the GPU whose context the thread has
        self.pinned: dict[int, int] = {}  # bytes by address
        self.copies: list[Copy] = []  # in the order in which they were asked for
        self.modules: list[bytes] = []  # machine code that was loaded
        self.load_statuses: list[int] = []  # of the next modules; 0 when there are no more
        # Types of each function's arguments, as of `struct`, and the code that it is a part of.
        self._functions: list[tuple[str, bytes]] = []
        self.launches: list[Launch] = []
        self.launch_status = 0  # of every launch
        self.before_launch: Callable[[], None] = lambda: None  # runs before arguments are read
        self.shared_bytes: list[int] = []  # limits of shared memory that were set

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0 if number < self._gpus else 101

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = self.current or 0
        return NO_CONTEXT if self.current is None else 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = _CONTEXT + device.value
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current = (context.value or 0) - _CONTEXT
        return 0

    def cuMemHostRegister_v2(
        self, address: ctypes.c_void_p, size: ctypes.c_size_t, flags: int
    ) -> int:
        if self.queues.refuses_to_pin:
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
        if self.current is None:
            return NO_CONTEXT
        at, first, count = to.value or 0, source.value or 0, size.value
        try:
            self.queues.copy(
                self.queues.by_handle(stream.value or 0),
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
        self.queues.refuses_to_pin = True

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        status = self.load_statuses.pop(0) if self.load_statuses else 0
        if status or not code.startswith(b"\x7fELF"):
            return status or 200
        self.modules.append(code)
        module._obj.value = _MODULE + len(self.modules) - 1
        return 0

    def cuModuleGetFunction(self, function: Any, module: ctypes.c_void_p, name: bytes) -> int:
        code = self.modules[(module.value or 0) - _MODULE]
        if b"\0" + name + b"\0" not in code:  # in the table of an ELF file's strings
            return 500
        function._obj.value = self.add_function("", code).value
        return 0

    def add_function(self, arguments: str, code: bytes = b"") -> ctypes.c_void_p:
        """Return a kernel whose arguments have these types: letters of `struct`."""
        self._functions.append((arguments, code))
        return ctypes.c_void_p(_FUNCTION + len(self._functions) - 1)

    def code_of(self, function: ctypes.c_void_p) -> bytes:
        """Return the code that a kernel was found in."""
        return self._functions[(function.value or 0) - _FUNCTION][1]

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, number: int, value: int) -> int:
        assert number == 8  # bytes of dynamic shared memory
        self.shared_bytes.append(value)
        return 0

    def cuLaunchKernelEx(
        self, config: Any, function: ctypes.c_void_p, places: Any, extra: None
    ) -> int:
        self.before_launch()
        handle = function.value or 0
        arguments, _ = self._functions[handle - _FUNCTION]
        values: list[int | float] = []
        for kind, place in zip(arguments, places, strict=False):
            values += struct.unpack(kind, ctypes.string_at(place, struct.calcsize(kind)))
        read = ctypes.cast(config, ctypes.POINTER(_Config)).contents
        attributes = [
            (read.attributes[n].number, list(read.attributes[n].value))
            for n in range(read.attribute_count)
        ]
        grid, block = list(read.grid), list(read.block)
        self.launches.append(
            Launch(handle, values, grid, block, read.shared_bytes, read.stream, attributes)
        )
        return self.launch_status

    def cuGetErrorString(self, status: int, text: Any) -> int:
        if status in _ERRORS:
            text._obj.value = _ERRORS[status].encode()
        return 0
