"""CUDA norms and gates in 16 bits are those in float32, rounded; run on the CPU."""

import pytest
import torch

from headroom.kernels.cuda import norms
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)


def test_norms_and_gates_in_bf16_are_those_in_float32_rounded() -> None:
    x, weight = torch.randn(5, 132), torch.randn(132)
    wide, also, narrow_ = torch.zeros(5, 132), torch.zeros(5, 132), torch.zeros(5, 132).bfloat16()
    norms.rms_norm(x, weight, 1e-6, wide)
    norms.norm_narrow(x, weight, 1e-6, narrow_, also)
    assert torch.equal(also, wide)
    assert torch.equal(narrow_, wide.bfloat16())
    norms.norm_narrow(-x, weight, 1e-6, narrow_)
    assert torch.equal(narrow_, -wide.bfloat16())
    for activation in ("silu", "gelu"):
        gated = torch.zeros(5, 66).bfloat16()
        norms.gated_narrow(x[:, :66], x[:, 66:], activation, gated)
        assert torch.equal(
            gated, norms.gated_activation(x[:, :66], x[:, 66:], activation).bfloat16()
        )
