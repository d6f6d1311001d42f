"""Every CPU kernel with non-contiguous inputs, and with values at the ends of float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Kernel, Span
from headroom.kernels.registry import KERNELS as ALL_KERNELS
from headroom.kernels.weight import Weight
from tests.kernels.cases import Sized, all_cases, make_inputs
from tests.kernels.test_registry import own_case, own_inputs, results, rounded_type

# The CPU's kernels; Triton's are in test_triton.py.
KERNELS = [kernel for kernel in ALL_KERNELS if not kernel.backend.startswith(("cuda", "triton"))]

SCALES = (2.0**100, 2.0**50, 2.0**-50, 2.0**-100, 2.0**-133)  # the last leaves few digits


def apart(value: Any) -> Any:
    """Return a non-contiguous copy: each number is followed by a zero that must not be read."""
    if isinstance(value, tuple):
        return tuple(apart(item) for item in value)
    if isinstance(value, Span):
        return replace(value, pages=apart(value.pages), tree=apart(value.tree))
    if not isinstance(value, torch.Tensor):
        return value
    wide = torch.stack((value, torch.zeros_like(value)), dim=-1)[..., 0]
    assert wide.numel() < 2 or not wide.is_contiguous()
    return wide


def runs_here(kernel: Kernel) -> bool:
    return MODULE is not None or kernel.backend == "reference"


def on_each_isa(*ops: str) -> list[Any]:
    """Return kernels of some operations with each instruction set; the reference has one."""
    isas = MODULE.isas() if MODULE else ["none"]
    return [
        pytest.param(kernel, name, id=f"{kernel}-{name}")
        for kernel in KERNELS
        if runs_here(kernel) and kernel.op in ops
        for name in (isas[:1] if kernel.backend == "reference" else isas)
    ]


def one_of_each_type(kernel: Kernel) -> list[Sized]:
    """The last case of every type that the kernel takes, of more than one row but not many."""
    cases = {
        sized.case: sized
        for sized in all_cases()
        if sized.op == kernel.op
        and 1 < sized.sizes[0] < 50
        and not kernel.refuses(own_case(kernel, sized).case)
    }
    return list(cases.values())


# The argument that an operation changes in place: the engine's own contiguous memory.
CHANGED = {"route": 3, "kv_write": 0, "delta_net": 4}


def scattered_inputs(kernel: Kernel, sized: Sized) -> tuple[Any, ...]:
    inputs = own_inputs(kernel, make_inputs(sized))
    kept = CHANGED.get(kernel.op)
    return tuple(
        value if isinstance(value, Weight) or place == kept else apart(value)
        for place, value in enumerate(inputs)
    )


@pytest.mark.parametrize("kernel", [k for k in KERNELS if runs_here(k)], ids=str)
def test_inputs_may_be_non_contiguous(kernel: Kernel) -> None:
    cases = one_of_each_type(kernel)
    assert cases
    for sized in cases:
        together = own_inputs(kernel, make_inputs(sized))
        scattered = scattered_inputs(kernel, sized)
        expected = results(sized, together, kernel.run(*together))
        got = results(sized, scattered, kernel.run(*scattered))
        for ours, wanted in zip(got, expected, strict=True):
            # torch uses other instructions for non-contiguous values.
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6, msg=str(sized))


@pytest.mark.parametrize(("kernel", "isa"), on_each_isa("matmul", "rope"), indirect=["isa"])
def test_results_scale_with_inputs_of_any_magnitude(kernel: Kernel, isa: str) -> None:
    for sized in (sized for sized in all_cases() if sized.op == kernel.op):
        few = 0 < sized.sizes[0] < 40 and sized.sizes[1] > 1
        if not few or kernel.refuses(own_case(kernel, sized).case):
            continue
        x, *rest = own_inputs(kernel, make_inputs(sized))
        result = kernel.run(x, *rest).double()
        for scale in SCALES:
            wanted = result * scale
            got = kernel.run(x * scale, *rest).double()
            # Below the normal range a float has steps of 1.4e-45, and no scale of 8 or 24 bits.
            tiny = {"int8": 1e-36, "int24": 1e-30}.get(rounded_type(kernel), 1e-43 * x.shape[-1])
            allowed = 1e-6 * float(wanted.abs().max()) + tiny
            assert float((got - wanted).abs().max()) <= allowed, (sized, scale)


@pytest.mark.parametrize(("kernel", "isa"), on_each_isa("rms_norm"), indirect=["isa"])
def test_norms_of_rows_of_any_magnitude_are_finite(kernel: Kernel, isa: str) -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    large = kernel.run(x * 1e15, weight, 1e-5)
    torch.testing.assert_close(large, kernel.run(x, weight, 0.0), rtol=1e-5, atol=1e-6)
    for scale in (1e-15, 1e-30, 1e-40, 0.0):
        expected = x * scale * weight / 1e-5**0.5
        got = kernel.run(x * scale, weight, 1e-5)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize(("kernel", "isa"), on_each_isa("gated_activation"), indirect=["isa"])
def test_gates_of_any_magnitude_open_or_close(kernel: Kernel, isa: str) -> None:
    gate = torch.tensor([[1e30, 200, 88.8, 1e-30, 1e-40, 0.0, -0.0, -88.8, -200, -1e30] * 2])
    up = torch.ones_like(gate)
    silu, gelu = (kernel.run(gate, up, activation).double() for activation in ("silu", "gelu"))
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(silu, expected, rtol=1e-5, atol=1e-35)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(gelu, expected, rtol=1e-5, atol=1e-35)
