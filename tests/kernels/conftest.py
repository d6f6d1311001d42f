"""What the kernel tests share."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from headroom.kernels.native.module import MODULE, POOL


@pytest.fixture(params=MODULE.isas() if MODULE else ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has, one after another."""
    POOL.set(2, isa=request.param if MODULE else "")
    yield request.param
    POOL.set(torch.get_num_threads())


@pytest.fixture
def pool() -> Iterator[None]:
    """Leave the threads as they were, whatever instruction set a test chose."""
    yield
    POOL.set(torch.get_num_threads())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let launchers find an H200; a test may give it the properties of another GPU."""
    properties = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.fixture
def gpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU make a GPU's products: it has none with wider sums, nor always those of bf16."""

    def product(
        x: torch.Tensor,
        matrix: torch.Tensor,
        out: torch.Tensor,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert out.dtype == (out_dtype or x.dtype)
        return out.copy_(torch.matmul(x.float(), matrix.float()))

    monkeypatch.setattr(torch, "mm", product)
