"""Every kernel with inputs that lie apart in memory, and with values at the ends of float32."""

from typing import Any

import pytest
import torch

from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Kernel, Span
from headroom.kernels.registry import KERNELS
from headroom.kernels.weight import Weight
from tests.kernels.cases import all_cases, make_inputs
from tests.kernels.test_kernels import isa, own_case, own_inputs, results  # noqa: F401

SCALES = (2.0**100, 2.0**50, 2.0**-50, 2.0**-100, 2.0**-133)  # the last leaves few digits


def apart(value: Any) -> Any:
    """The same numbers, each followed by one that must not be read."""
    if isinstance(value, tuple):
        return tuple(apart(item) for item in value)
    if isinstance(value, Span):
        tree = None if value.tree is None else apart(value.tree)
        return Span(value.first_row, value.rows, value.start, apart(value.pages), tree)
    if not isinstance(value, torch.Tensor):
        return value
    wide = torch.stack((value, torch.zeros_like(value)), dim=-1)[..., 0]
    assert wide.numel() < 2 or not wide.is_contiguous()
    return wide


def runs_here(kernel: Kernel) -> bool:
    return MODULE is not None or kernel.backend == "reference"


@pytest.mark.parametrize("kernel", [k for k in KERNELS if runs_here(k)], ids=str)
def test_inputs_may_lie_apart_in_memory(kernel: Kernel) -> None:
    compared = 0
    for sized in (sized for sized in all_cases() if sized.op == kernel.op):
        if kernel.refuses(own_case(kernel, sized).case):
            continue
        together = own_inputs(kernel, make_inputs(sized))
        scattered = tuple(
            value if isinstance(value, Weight) else apart(value)
            for value in own_inputs(kernel, make_inputs(sized))
        )
        expected = results(sized, together, kernel.run(*together))
        for got, wanted in zip(
            results(sized, scattered, kernel.run(*scattered)), expected, strict=True
        ):
            # Torch takes other instructions for values that lie apart.
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, msg=str(sized))
        compared += 1
    assert compared


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "kernel",
    [k for k in KERNELS if runs_here(k) and k.op in ("matmul", "rope")],
    ids=str,
)
def test_results_scale_with_inputs_of_any_size(kernel: Kernel, scale: float, isa: str) -> None:  # noqa: F811
    for sized in (sized for sized in all_cases() if sized.op == kernel.op):
        if not sized.sizes[0] or kernel.refuses(own_case(kernel, sized).case):
            continue
        x, *rest = own_inputs(kernel, make_inputs(sized))
        got = kernel.run(x * scale, *rest).double()
        wanted = kernel.run(x, *rest).double() * scale
        # Below the normal range a float has steps of 1.4e-45, and no 8 bits can be had of it.
        tiny = 1e-36 if kernel.backend.endswith("int8") else 1e-43 * x.shape[-1]
        allowed = 1e-6 * float(wanted.abs().max()) + tiny
        assert float((got - wanted).abs().max()) <= allowed, sized


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if runs_here(k) and k.op == "rms_norm"], ids=str
)
def test_norms_of_rows_of_any_size_are_numbers(kernel: Kernel, isa: str) -> None:  # noqa: F811
    x, weight = torch.randn(3, 40), torch.randn(40)
    large = kernel.run(x * 1e15, weight, 1e-5)
    torch.testing.assert_close(large, kernel.run(x, weight, 0.0), rtol=1e-5, atol=1e-6)
    for scale in (1e-15, 1e-30, 1e-40, 0.0):
        expected = x * scale * weight / 1e-5**0.5
        got = kernel.run(x * scale, weight, 1e-5)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if runs_here(k) and k.op == "gated_activation"], ids=str
)
def test_gates_of_any_size_open_or_close(kernel: Kernel, isa: str) -> None:  # noqa: F811
    gate = torch.tensor([[1e30, 200, 88.8, 1e-30, 1e-40, 0.0, -0.0, -88.8, -200, -1e30] * 2])
    up = torch.ones_like(gate)
    result = kernel.run(gate, up)
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-35)
