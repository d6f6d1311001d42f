"""What `headroom doctor` tries runs on a GPU here, and driver and torch agree on which it is."""

import pytest
import torch

from headroom.cli.doctor_gpus import gpus
from headroom.kernels.cuda.probe import PROBES, try_kernels
from headroom.kernels.triton.probe import try_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_kernels_of_every_family_run_here_or_need_a_later_gpu() -> None:
    found = try_kernels(0)
    wrong = {family: why for family, why in found.items() if why and not why.startswith("needs sm")}
    assert not wrong
    assert len(found) == len(PROBES)


def test_a_kernel_of_tritons_runs_here() -> None:
    assert try_triton(0) == ""


def test_the_first_gpu_is_the_one_that_torch_means() -> None:
    first = gpus(try_all=False, told=lambda text: None)[0]
    assert first["name"] == "cuda:0"
    assert not first["refused"]
