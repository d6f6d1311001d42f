"""The whole kernel table on a GPU: CUDA's and Triton's kernels against the reference."""

import pytest
import torch

from headroom.kernels.registry import KERNELS
from tests.gpu.jobs import PARTS
from tests.gpu.table import Group, compare_group, groups, on_gpu, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OF_A_GPU = [kernel for kernel in KERNELS if kernel.backend.startswith(("cuda", "triton"))]


@pytest.mark.parametrize("group", spread(groups(OF_A_GPU), PARTS["test_gpu_table"]), ids=str)
def test_every_kernel_agrees_with_the_reference(group: Group) -> None:
    if group.dtype == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 is of later GPUs")
    with torch.inference_mode():
        assert compare_group(group, on_gpu) == len(group.cases)
        torch.cuda.synchronize()
