"""What the driver reads of a launch: written anew for every one, by every thread for itself."""

import ctypes
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import compile as cuda
from headroom.kernels.cuda import launch
from headroom.kernels.cuda.compile import CudaKernel
from headroom.kernels.cuda.launch import MOST_ARGUMENTS, Argument, Arguments
from tests.stand_in.driver import Driver, Launch
from tests.stand_in.gpu import stand_in_driver

STREAM, DEVICE = 0x7000_0000_1234, 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The driver, and a stream of each GPU whose handle has more than 32 bits."""
    monkeypatch.setattr(cuda, "stream_of", lambda device: STREAM + device)
    with stand_in_driver(monkeypatch) as made:
        yield made


def kernel(gpu: Driver, arguments: str = "", early: bool = True) -> CudaKernel:
    """Return a kernel whose arguments have these types: letters of `struct`."""
    return CudaKernel("small.cu:norm", gpu.add_function(arguments), early, DEVICE)


def test_a_launch_tells_the_driver_all_it_was_given(gpu: Driver) -> None:
    x = torch.zeros(3)
    other, function = gpu.add_function("i"), gpu.add_function("PiPf")
    assert other.value != function.value
    CudaKernel("small.cu:norm", function, True, DEVICE)((5, 6), (128,), (x, -7, None, 0.5), 1024)
    assert gpu.launches == [
        Launch(
            function=function.value or 0,
            values=[x.data_ptr(), -7, 0, 0.5],
            grid=[5, 6, 1],
            block=[128, 1, 1],
            shared_bytes=1024,
            stream=STREAM + DEVICE,
            attributes=[],
        )
    ]


def test_only_a_gpu_that_can_starts_kernels_early(gpu: Driver) -> None:
    kernel(gpu)((1,), (1,), (), early=True)
    kernel(gpu, early=False)((1,), (1,), (), early=True)
    kernel(gpu)((1,), (1,), ())
    assert [found.attributes for found in gpu.launches] == [[(6, [1] + [0] * 15)], [], []]


def test_arguments_of_other_types_come_to_the_same_slots(gpu: Driver) -> None:
    x = torch.zeros(3)
    kernel(gpu, "PPi")((1,), (1,), (x, x, 2**31 - 1))
    kernel(gpu, "ifP")((1,), (1,), (-1, 1e-6, None))
    kernel(gpu, "Pii")((1,), (1,), (torch.nn.Parameter(x, requires_grad=False), True, False))
    first, second, third = (found.values for found in gpu.launches)
    assert first == [x.data_ptr(), x.data_ptr(), 2**31 - 1]
    assert second == [-1, struct.unpack("f", struct.pack("f", 1e-6))[0], 0]
    assert third == [x.data_ptr(), 1, 0]


@pytest.mark.parametrize("number", [1 << 31, -(1 << 31) - 1])
def test_a_number_of_more_than_32_bits_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="invalid value"):
        Arguments().fill((number,))


def test_more_arguments_than_there_are_slots_are_refused() -> None:
    with pytest.raises(IndexError):
        Arguments().fill([0] * (MOST_ARGUMENTS + 1))


def test_a_launch_of_no_blocks_does_nothing(gpu: Driver) -> None:
    kernel(gpu)((4, 0), (1,), ())
    assert not gpu.launches


def test_shared_memory_is_asked_for_whenever_it_is_more_than_before(gpu: Driver) -> None:
    """Also where 48 KiB would do, which come unasked: a kernel may have more at fixed places."""
    run = kernel(gpu)
    for size in (0, 48 << 10, 64 << 10, 64 << 10, 50 << 10):
        run((1,), (1,), (), size)
    assert gpu.shared_bytes == [48 << 10, 64 << 10]


def test_a_refused_launch_names_its_kernel(gpu: Driver) -> None:
    gpu.launch_status = 701
    reason = r"^The CUDA kernel small.cu:norm could not be started: too many resources\.$"
    with pytest.raises(KernelError, match=reason):
        kernel(gpu)((1,), (1,), ())


def test_a_launch_of_another_thread_changes_nothing(gpu: Driver) -> None:
    """While the driver is called, which is outside of Python's lock, another thread launches."""

    def launch_in_another_thread() -> None:
        gpu.before_launch = lambda: None
        other = threading.Thread(target=lambda: kernel(gpu, "ii")((9,), (9,), (30, 40)))
        other.start()
        other.join()

    gpu.before_launch = launch_in_another_thread
    kernel(gpu, "ii")((1,), (2,), (10, 20))
    inner, outer = gpu.launches
    assert (inner.values, inner.grid, inner.block) == ([30, 40], [9, 1, 1], [9, 1, 1])
    assert (outer.values, outer.grid, outer.block) == ([10, 20], [1, 1, 1], [2, 1, 1])


def test_a_kernel_is_found_by_source_name_gpu_and_macros(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda, "_FOUND", {})
    monkeypatch.setattr(cuda, "_find_kernel", lambda *key: made.append(key) or object())
    monkeypatch.setattr(cuda, "current_device", lambda: len(made) // 4)
    asked = [("a.cu", "f", None), ("a.cu", "f", {"A": 1, "B": 2}), ("a.cu", "f", {"A": 2, "B": 1}),
             ("a.cu", "g", {"A": 1, "B": 2})]  # fmt: skip
    found = [cuda.compile_kernel(*one) for one in asked]
    assert [key[-1] for key in made] == [0] * 4
    assert len(set(map(id, found))) == 4
    assert cuda.compile_kernel(*asked[1]) is not found[1]  # of the second GPU
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    assert [cuda.compile_kernel(*one) for one in asked] == found
    assert made[1] == ("a.cu", "f", (("A", 1), ("B", 2)), 0)


def test_a_torch_without_the_short_way_is_asked_for_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        cuda_stream = 99

    asked: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: asked.append(device) or Stream()
    )
    assert launch._slow_stream(3) == 99
    assert asked == [3]


def test_arguments_may_be_anything_that_is_a_float() -> None:
    class Half(float):
        pass

    found = Arguments()
    values: list[Argument] = [Half(0.5), 2.0]
    found.fill(values)
    places = (found.places[0], found.places[1])
    assert [struct.unpack("f", ctypes.string_at(p, 4))[0] for p in places] == [0.5, 2.0]
