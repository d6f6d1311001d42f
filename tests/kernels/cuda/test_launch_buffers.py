"""What the driver reads of a launch: written anew for every one, by every thread for itself."""

import ctypes
import struct
import threading
from typing import Any

import pytest
import torch

from headroom.errors import KernelError
from headroom.kernels.cuda import compile as cuda
from headroom.kernels.cuda import driver, launch
from headroom.kernels.cuda.compile import CudaKernel
from headroom.kernels.cuda.launch import MOST_ARGUMENTS, Argument, Arguments

STREAM, DEVICE = 0x7000_0000_1234, 1


class Attribute(ctypes.Structure):
    """As the driver's header has it."""

    _fields_ = (("number", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """As the driver's header has it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class FakeDriver:
    """Reads what it is given as the driver does; `kinds` are a kernel's parameters by letter."""

    def __init__(self, kinds: str = "", status: int = 0) -> None:
        self.kinds, self.status = kinds, status
        self.launches: list[dict[str, Any]] = []
        self.shared: list[int] = []
        self.between = lambda: None  # runs before the arguments are read
        self.cuFuncSetAttribute, self.cuLaunchKernelEx = self._set_attribute, self._launch
        self.cuGetErrorString = self._error_string

    def _set_attribute(self, function: ctypes.c_void_p, number: int, value: int) -> int:
        self.shared.append(value)
        return 0

    def _launch(self, config: Any, function: Any, places: Any, extra: None) -> int:
        self.between()
        values = []
        for kind, place in zip(self.kinds, places, strict=False):
            values += struct.unpack(kind, ctypes.string_at(place, struct.calcsize(kind)))
        read = ctypes.cast(config, ctypes.POINTER(Config)).contents
        attributes = [
            (read.attributes[n].number, list(read.attributes[n].value))
            for n in range(read.attribute_count)
        ]
        self.launches.append({
            "function": function.value, "values": values, "grid": list(read.grid),
            "block": list(read.block), "shared": read.shared_bytes, "stream": read.stream,
            "attributes": attributes,
        })  # fmt: skip
        return self.status

    def _error_string(self, status: int, text: Any) -> int:
        text._obj.value = b"too many resources"
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for module in (cuda, driver):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(cuda, "stream_of", lambda device: STREAM + device)
    return fake


def kernel(early: bool = True) -> CudaKernel:
    return CudaKernel("small.cu:norm", ctypes.c_void_p(77), early, DEVICE)


def test_a_launch_tells_the_driver_all_it_was_given(gpu: FakeDriver) -> None:
    gpu.kinds = "PiPf"
    x = torch.zeros(3)
    kernel()((5, 6), (128,), (x, -7, None, 0.5), 1024)
    (found,) = gpu.launches
    assert found == {
        "function": 77, "values": [x.data_ptr(), -7, 0, 0.5], "grid": [5, 6, 1],
        "block": [128, 1, 1], "shared": 1024, "stream": STREAM + DEVICE, "attributes": [],
    }  # fmt: skip


def test_only_a_gpu_that_can_starts_kernels_early(gpu: FakeDriver) -> None:
    kernel()((1,), (1,), (), early=True)
    kernel(early=False)((1,), (1,), (), early=True)
    kernel()((1,), (1,), ())
    assert [found["attributes"] for found in gpu.launches] == [[(6, [1] + [0] * 15)], [], []]


def test_arguments_of_other_types_come_to_the_same_slots(gpu: FakeDriver) -> None:
    x = torch.zeros(3)
    run = kernel()
    gpu.kinds = "PPi"
    run((1,), (1,), (x, x, 2**31 - 1))
    gpu.kinds = "ifP"
    run((1,), (1,), (-1, 1e-6, None))
    gpu.kinds = "Pii"
    run((1,), (1,), (torch.nn.Parameter(x, requires_grad=False), True, False))
    first, second, third = (found["values"] for found in gpu.launches)
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


def test_a_launch_of_no_blocks_does_nothing(gpu: FakeDriver) -> None:
    kernel()((4, 0), (1,), ())
    assert not gpu.launches


def test_shared_memory_is_asked_for_whenever_it_is_more_than_before(gpu: FakeDriver) -> None:
    """Also where 48 KiB would do, which come unasked: a kernel may have more at fixed places."""
    run = kernel()
    for size in (0, 48 << 10, 64 << 10, 64 << 10, 50 << 10):
        run((1,), (1,), (), size)
    assert gpu.shared == [48 << 10, 64 << 10]


def test_a_refused_launch_names_its_kernel(gpu: FakeDriver) -> None:
    gpu.status = 701
    with pytest.raises(KernelError, match=r"The CUDA kernel small.cu:norm could not be started"):
        kernel()((1,), (1,), ())


def test_a_launch_of_another_thread_changes_nothing(gpu: FakeDriver) -> None:
    """While the driver is called, which is outside of Python's lock, another thread launches."""
    gpu.kinds = "ii"

    def beside() -> None:
        gpu.between = lambda: None
        other = threading.Thread(target=lambda: kernel()((9,), (9,), (30, 40)))
        other.start()
        other.join()

    gpu.between = beside
    kernel()((1,), (2,), (10, 20))
    inner, outer = gpu.launches
    assert (inner["values"], inner["grid"], inner["block"]) == ([30, 40], [9, 1, 1], [9, 1, 1])
    assert (outer["values"], outer["grid"], outer["block"]) == ([10, 20], [1, 1, 1], [2, 1, 1])


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
