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

SCALES = (1e30, 1e15, 1e-15, 1e-30, 1e-40)


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
            assert torch.equal(got, wanted), sized
        compared += 1
    assert compared


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "kernel",
    [k for k in KERNELS if runs_here(k) and k.op in ("matmul", "rope", "rms_norm")],
    ids=str,
)
def test_results_scale_with_inputs_of_any_size(kernel: Kernel, scale: float, isa: str) -> None:  # noqa: F811
    reference = next(k for k in KERNELS if k.op == kernel.op and k.backend == "reference")
    for sized in (sized for sized in all_cases() if sized.op == kernel.op):
        if not sized.sizes[0] or kernel.refuses(own_case(kernel, sized).case):
            continue
        inputs = own_inputs(kernel, make_inputs(sized))
        plain = make_inputs(sized)
        got = kernel.run(inputs[0] * scale, *inputs[1:])
        assert got.isfinite().all() or kernel.op == "rms_norm", sized
        if kernel.op == "rms_norm" and scale > 1e18:
            continue  # squares are beyond float32, on every backend
        wanted = reference.run((plain[0] * scale).double(), *doubled(plain[1:]))
        share = 2e-2 if kernel.backend.endswith("int8") else 1e-5
        largest = float(wanted.abs().max())
        # Below the normal range a float has fewer digits: its steps are 1.4e-45.
        allowed = share * largest + inputs[0].shape[-1] * 1e-43
        assert float((got.double() - wanted).abs().max()) <= allowed, sized


def doubled(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.double() if isinstance(v, torch.Tensor) else v for v in values)


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if runs_here(k) and k.op == "gated_activation"], ids=str
)
def test_gates_of_any_size_open_or_close(kernel: Kernel, isa: str) -> None:  # noqa: F811
    gate = torch.tensor([[1e30, 200, 88.8, 1e-30, 1e-40, 0.0, -0.0, -88.8, -200, -1e30] * 2])
    up = torch.ones_like(gate)
    result = kernel.run(gate, up)
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-35)
