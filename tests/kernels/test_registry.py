"""The table of kernels: every CPU kernel against the reference, over types and awkward sizes.

Triton's kernels run on fewer cases in test_triton.py, in Triton's interpreter; tests/gpu/table.py
runs all cases of the CUDA and Triton kernels on a GPU. The reference itself is tested against
definitions, in test_reference.py and others.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headroom.kernels.native.matmul import prepare
from headroom.kernels.native.module import MODULE, POOL
from headroom.kernels.ops import ExpertTable, Kernel
from headroom.kernels.registry import KERNELS
from headroom.kernels.weight import Weight
from tests.kernels.cases import Sized, all_cases, make_inputs

SHARE = 1e-5  # of the largest value of the result: float32 sums in another order
# Of the result's norm, where values inside an operation are rounded to so many bits.
INNER_ROUNDING = {"int8": 0.02, "int24": 1e-5}
LARGEST = {"int8": 127, "int24": 127 << 16}  # of the whole numbers that activations are rounded to


DTYPE_AT = {"matmul": 2, "experts": 5}  # where an operation's arguments name its products' type


def rounded_type(kernel: Kernel) -> str:
    """Return the type that a kernel rounds activations to, or "" if it does not."""
    return next((name for name in LARGEST if kernel.backend.endswith(name)), "")


def own_inputs(kernel: Kernel, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs with weights in the kernel's layout and with its type of products."""
    lay_out = prepare if kernel.backend.startswith("native") else kernel.prepare
    own = [lay_out(value) if isinstance(value, Weight) else value for value in inputs]
    own = [kernel.prepare(value) if isinstance(value, ExpertTable) else value for value in own]
    if kernel.op in DTYPE_AT:
        place = DTYPE_AT[kernel.op]
        own[place] = rounded_type(kernel) or own[place]
    return tuple(own)


def own_case(kernel: Kernel, sized: Sized) -> Sized:
    """Return the case with the kernel's type of products and layout of tables."""
    case = sized.case
    if dtype := rounded_type(kernel):
        case = replace(case, dtype=dtype)
    if kernel.op == "embed" and kernel.backend == "native":
        case = replace(case, layout="panels")
    return replace(sized, case=case)


def results(sized: Sized, inputs: tuple[Any, ...], returned: Any) -> list[torch.Tensor]:
    if sized.op == "route":
        return [*returned, inputs[3]]  # ids, weights, counts
    if sized.op == "delta_net":  # and what it leaves behind
        return [returned, inputs[4].memory, inputs[4].inputs]
    return [inputs[0].keys, inputs[0].values] if sized.op == "kv_write" else [returned]


def test_every_operation_has_cases_and_a_reference() -> None:
    operations = {kernel.op for kernel in KERNELS}
    assert {sized.op for sized in all_cases()} == operations
    assert {kernel.op for kernel in KERNELS if kernel.backend == "reference"} == operations


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.backend not in ("reference", "triton")], ids=str
)
@pytest.mark.usefixtures("pool")
def test_every_kernel_agrees_with_the_reference_on_every_instruction_set(kernel: Kernel) -> None:
    reference = next(k for k in KERNELS if k.op == kernel.op and k.backend == "reference")
    compared = 0
    for sized in (sized for sized in all_cases() if sized.op == kernel.op):
        if kernel.refuses(own_case(kernel, sized).case):
            continue
        theirs = make_inputs(sized)
        dtype = rounded_type(kernel)
        if kernel.op == "matmul" and dtype:
            theirs = (rounded(theirs[0], LARGEST[dtype]), *theirs[1:])
        wanted = results(sized, theirs, reference.run(*theirs))
        for isa in MODULE.isas() if MODULE else [""]:
            POOL.set(2, isa=isa)
            ours = own_inputs(kernel, make_inputs(sized))
            for result, expected in zip(
                results(sized, ours, kernel.run(*ours)), wanted, strict=True
            ):
                if kernel.op == "experts" and dtype:
                    _compare_rounded(sized, result, expected, INNER_ROUNDING[dtype])
                else:
                    _compare(sized, result, expected)
        compared += 1
    skip_unless(compared, kernel)


def skip_unless(compared: int, kernel: Kernel) -> None:
    """Skip a test that compared nothing: the kernel needs a GPU, or the C++ module is missing."""
    if not compared:
        assert kernel.backend.startswith("cuda") or MODULE is None, "a CPU kernel without cases"
        first = next(sized for sized in all_cases() if sized.op == kernel.op)
        pytest.skip(str(kernel.refuses(own_case(kernel, first).case)))


def rounded(x: torch.Tensor, largest: int) -> torch.Tensor:
    """Round activations to whole numbers up to `largest`, with one step for 32 columns."""
    blocks = x.reshape(len(x), x.shape[1] // 32, 32)
    step = blocks.abs().amax(-1, keepdim=True) / largest
    return (torch.round(blocks / step) * step).reshape(x.shape)


def _compare(sized: Sized, result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape, sized
    assert result.dtype == expected.dtype, sized
    if not result.is_floating_point() or not result.numel():
        assert torch.equal(result, expected), sized
        return
    largest = float(expected.float().abs().max())
    assert float((result.float() - expected.float()).abs().max()) <= SHARE * largest, sized


def _compare_rounded(
    sized: Sized, result: torch.Tensor, expected: torch.Tensor, share: float
) -> None:
    assert result.shape == expected.shape, sized
    assert float((result - expected).norm()) <= share * float(expected.norm()), sized


# The arguments of an operation that have one entry per row. Operations over spans of rows are
# tested in test_attention.py, test_reference.py and test_delta_net.py.
ROW_ARGUMENTS = {
    "embed": (0, 2),
    "matmul": (0,),
    "rms_norm": (0,),
    "rope": (0, 1, 2),
    "gated_activation": (0, 1),
    "gated_norm": (0, 1),
    "route": (0,),
    "experts": (0, 1, 2),
}


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.op in ROW_ARGUMENTS and k.backend != "triton"], ids=str
)
@pytest.mark.usefixtures("pool")
def test_a_row_has_the_same_bits_alone_and_among_others(kernel: Kernel) -> None:
    compared = 0
    for sized in (sized for sized in all_cases() if sized.op == kernel.op and sized.sizes[0] > 1):
        if kernel.refuses(own_case(kernel, sized).case):
            continue
        inputs = own_inputs(kernel, make_inputs(sized))
        # The reference is torch's own code, whatever instruction set our C++ code takes.
        for isa in MODULE.isas() if MODULE and kernel.backend != "reference" else [""]:
            POOL.set(2, isa=isa)
            together = [value.clone() for value in _of_rows(sized, inputs, kernel)]
            for row in range(0, sized.sizes[0], 5):
                one = list(inputs)
                for place in ROW_ARGUMENTS[kernel.op]:
                    one[place] = inputs[place][row : row + 1]
                alone = _of_rows(sized, tuple(one), kernel)
                for a, b in zip(alone, together, strict=True):
                    assert torch.equal(a[0], b[row]), (sized, isa, row)
        compared += 1
    skip_unless(compared, kernel)


def _of_rows(sized: Sized, inputs: tuple[Any, ...], kernel: Kernel) -> list[torch.Tensor]:
    """The results of an operation that have one entry per row: all but the router's counts."""
    return results(sized, inputs, kernel.run(*inputs))[:2]
