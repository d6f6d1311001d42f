"""The thread pool of the C++ module with two callers at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headroom.formats.quants import BY_NAME
from headroom.kernels.native.matmul import matmul_f32, prepare
from headroom.kernels.native.module import MODULE, POOL
from tests.kernels.cases import random_weight

pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ module was not built")


@pytest.mark.usefixtures("pool")
def test_two_threads_may_call_kernels_at_once_and_get_their_own_results() -> None:
    POOL.set(2)
    torch.manual_seed(0)
    weights = [prepare(random_weight(BY_NAME[name], 200, 512)) for name in ("q4_k", "q8_0")]
    inputs = [torch.randn(rows, 512) for rows in (1, 40)]
    jobs = [(x, weight) for x in inputs for weight in weights]
    alone = [matmul_f32(x, weight, "f32") for x, weight in jobs]

    def run(turn: int) -> bool:
        x, weight = jobs[turn % len(jobs)]
        return torch.equal(matmul_f32(x, weight, "f32"), alone[turn % len(jobs)])

    with ThreadPoolExecutor(2) as callers:
        assert all(callers.map(run, range(400)))
