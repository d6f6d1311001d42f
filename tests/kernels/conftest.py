"""Fixtures of the kernel tests: instruction sets, threads, and stand-ins for a GPU's properties."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from headroom.kernels.native.module import MODULE, POOL


@pytest.fixture(params=MODULE.isas() if MODULE else ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once on each instruction set of this CPU."""
    POOL.set(2, isa=request.param if MODULE else "")
    yield request.param
    POOL.set(torch.get_num_threads())


@pytest.fixture
def pool() -> Iterator[None]:
    """Restore the threads and the instruction set after a test that changes them."""
    yield
    POOL.set(torch.get_num_threads())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Give launchers the properties of an H200; a test may change them to another GPU's."""
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.fixture
def gpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU compute torch.mm with an `out_dtype` and in bf16, which only GPUs have."""

    def product(
        x: torch.Tensor,
        matrix: torch.Tensor,
        out: torch.Tensor,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert out.dtype == (out_dtype or x.dtype)
        return out.copy_(torch.matmul(x.float(), matrix.float()))

    monkeypatch.setattr(torch, "mm", product)
