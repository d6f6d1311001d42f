"""What is asked of NVIDIA's driver, by the driver of the stand-in GPU."""

import ctypes
from collections.abc import Iterator

import pytest

from headroom.errors import KernelError
from headroom.kernels.cuda import driver as driving
from tests.stand_in.driver import Driver
from tests.stand_in.gpu import stand_in_driver
from tests.stand_in.streams import Stream

CODE = b"\x7fELF\0one\0"  # an ELF file's first bytes, and the name of its kernel


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver of a machine with two GPUs."""
    with stand_in_driver(monkeypatch, gpus=2) as made:
        yield made


@pytest.mark.parametrize("current", [None, 0, 1])
def test_code_is_loaded_on_the_gpu_that_it_is_for(current: int | None, driver: Driver) -> None:
    driver.current = current
    first = driving.load_module(CODE, 1)
    second = driving.load_module(CODE.replace(b"one", b"two"), 1)
    assert driver.current == 1
    assert driver.modules == [CODE, b"\x7fELF\0two\0"]
    assert driving.find_function(first, "one").value
    assert driving.find_function(second, "two").value


def test_what_the_driver_refuses_is_reported(driver: Driver) -> None:
    with pytest.raises(KernelError, match=r"^There is no cuda:2: invalid device\.$"):
        driving.load_module(CODE, 2)
    with pytest.raises(KernelError, match=r"^Kernels could not be loaded: error 200\.$"):
        driving.load_module(b"text", 0)
    module = driving.load_module(CODE, 0)
    with pytest.raises(KernelError, match=r"^There is no kernel two: not found\.$"):
        driving.find_function(module, "two")


@pytest.mark.parametrize("current", [None, 1])
def test_bytes_are_copied_in_the_order_of_a_stream_by_any_thread(
    current: int | None, driver: Driver
) -> None:
    driver.current = current
    stream = Stream(gpu=driver.queues)
    source, out = ctypes.create_string_buffer(b"bytes", 5), ctypes.create_string_buffer(5)
    end = ctypes.create_string_buffer(5)
    at = ctypes.addressof(out)
    driving.copy_async(at, ctypes.addressof(source), 5, stream.cuda_stream, 1)
    driving.copy_async(ctypes.addressof(end), at, 5, stream.cuda_stream, 1)
    assert (stream.submitted, driver.queues.main.submitted, driver.current) == (2, 0, 1)
    assert end.raw != b"bytes"  # neither call waits
    stream.drain()
    assert (out.raw, end.raw) == (b"bytes", b"bytes")


def test_a_copy_that_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.queues.refused_at = 1
    refusal = r"^8589934592 bytes could not be copied: a copy is refused\.$"
    with pytest.raises(KernelError, match=refusal):
        driving.copy_async(0, 0, 8 << 30, 0, 0)
