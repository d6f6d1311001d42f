"""What the kernel tests share."""

from collections.abc import Iterator

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
