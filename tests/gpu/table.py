"""The kernel table on a GPU: every case of every CUDA and Triton kernel, in groups that share code.

A group is a kernel, a type of products and the cases of the same types: what has to be compiled for
one case of it mostly serves the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.kernels.ops import ExpertTable, Kernel, PagedKv, RecurrentState, Span
from headroom.kernels.registry import KERNELS
from headroom.kernels.weight import PLAIN_TYPES, Weight
from tests.kernels.cases import Sized, all_cases, make_inputs
from tests.kernels.test_registry import DTYPE_AT, results

# Of the largest value of a result, by the type that products compute in; up to 9e-7, 0.005 and
# 0.0004 were measured on an H200, for some of Triton's cases.
SHARE = {"f32": 1e-5, "bf16": 0.02, "f16": 0.004}
# How many of a case's sizes decide which code runs: heads, say, and not the window.
CODE_SIZES = {"attention": 3, "delta_net": 3}
Move = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that one test goes over."""

    kernel: Kernel
    dtype: str
    cases: tuple[Sized, ...]

    def __str__(self) -> str:
        return f"{self.kernel}-{self.dtype}-{self.cases[0]}"


def refuses(kernel: Kernel, sized: Sized, dtype: str) -> str | None:
    """Say why a kernel does not run a case on a GPU; sizes it may refuse only when called."""
    if str(kernel) == "rms_norm-cuda" and sized.sizes[1] % 4:
        return f"rows of {sized.sizes[1]} values are no multiple of 4"
    return kernel.refuses(replace(sized.case, device="cuda", dtype=dtype))


def on_gpu(value: Any) -> Any:
    """Return a copy of an input on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, tuple):
        return tuple(on_gpu(one) for one in value)
    if isinstance(value, Weight):
        return replace(value, data=value.data.cuda())
    if isinstance(value, PagedKv):
        return replace(value, keys=value.keys.cuda(), values=value.values.cuda())
    if isinstance(value, RecurrentState):
        return RecurrentState(value.memory.cuda(), value.inputs.cuda())
    if isinstance(value, Span):
        tree = None if value.tree is None else value.tree.cuda()
        return replace(value, pages=value.pages.cuda(), tree=tree)
    if hasattr(value, "conv"):
        small = {name: getattr(value, name).cuda() for name in ("conv", "decay", "dt_bias")}
        return replace(value, **small)
    return value


def groups(kernels: Sequence[Kernel]) -> list[Group]:
    """Return every case that each kernel takes, in every type that it computes in."""
    found: dict[object, list[Sized]] = {}
    for kernel in kernels:
        for sized in (sized for sized in all_cases() if sized.op == kernel.op):
            for dtype in PLAIN_TYPES if kernel.op in DTYPE_AT else ("f32",):
                if refuses(kernel, sized, dtype) is None:
                    code = sized.sizes[: CODE_SIZES.get(kernel.op, 0)]
                    found.setdefault((kernel, dtype, sized.case, code), []).append(sized)
    return [Group(kernel, dtype, tuple(cases)) for (kernel, dtype, *_), cases in found.items()]


def spread(found: Sequence[Group], parts: int) -> list[Group]:
    """Return groups in an order of which each part of so many has some of every kernel."""
    return [group for part in range(parts) for group in found[part::parts]]


def compare_group(group: Group, move: Move) -> int:
    """Compare a kernel with the reference in float32 on the CPU; return how many cases there were.

    `move` brings an input to the kernel's device.
    """
    kernel = group.kernel
    reference = next(k for k in KERNELS if k.op == kernel.op and k.backend == "reference")
    for sized in group.cases:
        theirs = make_inputs(sized)
        wanted = results(sized, theirs, reference.run(*theirs))
        least = typical(reference, theirs) if kernel.op == "matmul" else 0.0
        ours = own_inputs(kernel, group.dtype, make_inputs(sized), move)
        found = results(sized, ours, kernel.run(*ours))
        for result, expected in zip(found, wanted, strict=True):
            _compare(sized, result.cpu(), expected, limit(kernel, sized, group.dtype), least)
    return len(group.cases)


def own_inputs(kernel: Kernel, dtype: str, inputs: tuple[Any, ...], move: Move) -> tuple[Any, ...]:
    """Return inputs on the kernel's device, weights as it reads them, products in its type."""
    own = [kernel.prepare(x) if isinstance(x, Weight | ExpertTable) else x for x in inputs]
    if kernel.op in DTYPE_AT:
        own[DTYPE_AT[kernel.op]] = dtype
    return tuple(move(value) for value in own)


def typical(reference: Kernel, inputs: tuple[Any, ...]) -> float:
    """How large products of normal numbers mostly are; one alone may be next to nothing."""
    weight = inputs[1]
    values = reference.run(torch.eye(weight.columns), weight, "f32")
    return float(values.norm(dim=0).max())


def limit(kernel: Kernel, sized: Sized, dtype: str) -> float:
    """What a kernel may be off: few rows of packed weights are multiplied in f16 in any case."""
    few = str(kernel) == "matmul-cuda" and sized.sizes[0] <= DECODE_ROWS
    return SHARE["f16" if few else dtype]


def _compare(
    sized: Sized, result: torch.Tensor, expected: torch.Tensor, share: float, least: float
) -> None:
    assert result.shape == expected.shape, sized
    assert result.dtype == expected.dtype, sized
    if not result.is_floating_point() or not result.numel():
        assert torch.equal(result, expected), sized
        return
    largest = max(float(expected.float().abs().max()), least)
    apart = float((result.float() - expected.float()).abs().max())
    assert apart <= share * largest, f"{sized}: {apart / largest:.1e} of the largest value"
