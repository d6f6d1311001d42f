"""What is asked of NVIDIA's driver, by a driver that is not there."""

import ctypes
from typing import Any

import pytest

from headroom.errors import KernelError
from headroom.kernels.cuda import driver as driving


class FakeDriver:
    """Takes one module of one kernel, on two GPUs."""

    def __init__(self, current: int | None) -> None:
        self.current = current  # the GPU whose context this thread has
        self.code = b""
        self.streams: list[int] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = number
        return 0 if number < 2 else 101

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = self.current or 0
        return 201 if self.current is None else 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        context._obj.value = 7000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.current = context.value - 7000
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        self.code, module._obj.value = code, 5
        return 0 if code.startswith(b"\x7fELF") else 200

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = 6
        return 0 if (module.value, name) == (5, b"one") else 500

    def cuMemcpyAsync(self, to: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        if self.current is None:
            return 201
        if size.value > 1 << 32:
            return 500
        ctypes.memmove(to, source, size.value)
        self.streams.append(stream.value)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = {101: b"invalid device", 500: b"not found"}.get(status)
        return 0


@pytest.mark.parametrize("current", [None, 0, 1])
def test_code_is_loaded_on_the_gpu_that_it_is_for(
    current: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(current)
    monkeypatch.setattr(driving, "driver", lambda: fake)
    module = driving.load_module(b"\x7fELF\0code", 1)
    assert (fake.current, fake.code) == (1, b"\x7fELF\0code")
    assert driving.find_function(module, "one").value == 6


def test_what_the_driver_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "driver", lambda: FakeDriver(0))
    with pytest.raises(KernelError, match=r"^There is no cuda:2: invalid device\.$"):
        driving.load_module(b"\x7fELF", 2)
    with pytest.raises(KernelError, match=r"^Kernels could not be loaded: error 200\.$"):
        driving.load_module(b"text", 0)
    module = driving.load_module(b"\x7fELF", 0)
    with pytest.raises(KernelError, match=r"^There is no kernel two: not found\.$"):
        driving.find_function(module, "two")


@pytest.mark.parametrize("current", [None, 1])
def test_bytes_are_copied_in_the_order_of_a_stream_by_any_thread(
    current: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(current)
    monkeypatch.setattr(driving, "driver", lambda: fake)
    source, out = ctypes.create_string_buffer(b"bytes", 5), ctypes.create_string_buffer(5)
    stream = 0x7000_0000_0008
    driving.copy_async(ctypes.addressof(out), ctypes.addressof(source), 5, stream, 1)
    assert (out.raw, fake.streams, fake.current) == (b"bytes", [stream], 1)


def test_a_copy_that_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "driver", lambda: FakeDriver(0))
    with pytest.raises(KernelError, match=r"^8589934592 bytes could not be copied: not found\.$"):
        driving.copy_async(0, 0, 8 << 30, 0, 0)
