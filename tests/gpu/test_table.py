"""The kernel table for a GPU runs every case and reports failures; this test needs no GPU."""

from collections import Counter
from dataclasses import replace

import pytest

from headroom.kernels.ops import Kernel
from headroom.kernels.registry import KERNELS
from headroom.kernels.triton import launch
from tests.gpu.table import Group, compare_group, groups, refuses, spread
from tests.kernels.cases import all_cases

REFERENCE = [kernel for kernel in KERNELS if kernel.backend == "reference"]


@pytest.fixture
def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that run on a GPU, as if Triton was there."""
    monkeypatch.setattr(launch, "MISSING", "")
    return [kernel for kernel in KERNELS if kernel.backend.startswith(("cuda", "triton"))]


def test_every_kernel_of_a_gpu_has_cases(of_a_gpu: list[Kernel]) -> None:
    assert {group.kernel for group in groups(of_a_gpu)} == set(of_a_gpu)
    triton = {kernel.op for kernel in of_a_gpu if kernel.backend == "triton"}
    assert triton == {kernel.op for kernel in KERNELS}


def test_every_case_that_is_not_refused_is_in_one_group(of_a_gpu: list[Kernel]) -> None:
    cases = all_cases()
    found = Counter(
        (str(group.kernel), group.dtype, case) for group in groups(of_a_gpu) for case in group.cases
    )
    assert set(found.values()) == {1}
    triton = {case for kernel, dtype, case in found if "triton" in kernel and dtype == "f32"}
    # Biases of experts and sinks of attention have no kernel for a GPU yet.
    assert triton == {x for x in cases if not (x.case.biases or x.case.sinks)}
    for kernel in of_a_gpu:
        for sized in (sized for sized in cases if sized.op == kernel.op):
            taken = any((str(kernel), dtype, sized) in found for dtype in ("f32", "bf16", "f16"))
            assert taken or refuses(kernel, sized, "bf16"), (kernel, sized)


def test_parts_have_all_groups_and_some_of_every_larger_kernel(of_a_gpu: list[Kernel]) -> None:
    found = groups(of_a_gpu)
    order = spread(found, 4)
    assert sorted(map(str, order)) == sorted(map(str, found))
    for first in range(4):
        part = order[first * len(order) // 4 : (first + 1) * len(order) // 4]
        assert {"attention-triton", "matmul-triton", "matmul-cuda"} <= {
            str(group.kernel) for group in part
        }


@pytest.mark.parametrize("kernel", REFERENCE, ids=str)
def test_the_reference_agrees_with_itself(kernel: Kernel) -> None:
    cases = [sized for sized in all_cases() if sized.op == kernel.op][:12]
    group = Group(kernel, "f32", tuple(cases))
    assert compare_group(group, lambda value: value) == len(cases)


@pytest.mark.parametrize("op", ["matmul", "rms_norm", "attention", "experts"])
def test_a_kernel_that_is_off_is_reported(op: str) -> None:
    kernel = next(kernel for kernel in REFERENCE if kernel.op == op)
    wrong = replace(kernel, run=lambda *inputs: kernel.run(*inputs) * 1.001)
    cases = [sized for sized in all_cases() if sized.op == op and sized.sizes[0] > 1][:1]
    with pytest.raises(AssertionError, match=r"1\.0e-03 of the largest value"):
        compare_group(Group(wrong, "f32", tuple(cases)), lambda value: value)
