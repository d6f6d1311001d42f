"""How errors are recognised and worded."""

import pytest
import torch

from headroom.errors import DeviceError, KernelError, is_out_of_memory

ENDS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.OutOfMemoryError(),
    KernelError("Kernels could not be loaded: out of memory."),
    KernelError("cuda:0 does not start: out of memory."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
]
OTHERS = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    KernelError("some.cu does not compile for sm_90"),
    ValueError("out of memory"),
    MemoryError("out of memory"),
    DeviceError("cuda:0 ran out of memory"),
]


@pytest.mark.parametrize("error", ENDS, ids=str)
def test_out_of_memory_is_recognised_from_the_driver_and_from_torch(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_do_not_count_as_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("first", [ENDS[0], OTHERS[0]], ids=["out of memory", "another"])
def test_the_error_that_spoiled_a_capture_is_found(first: Exception) -> None:
    def capture() -> None:
        try:
            raise first
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    with pytest.raises(RuntimeError, match="due to a previous error") as last:
        capture()
    assert is_out_of_memory(last.value) == (first is ENDS[0])
