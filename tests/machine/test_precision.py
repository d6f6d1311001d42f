"""The precision policy's tables, row by row."""

import pytest

from headroom.machine.precision import (
    common_precision,
    cuda_precision,
    device_precision,
    hip_precision,
)
from tests.plan.shapes import cpu, gpu


@pytest.mark.parametrize(
    ("sm", "kind"),
    [
        (120, "bf16"), (90, "bf16"), (89, "bf16"), (86, "bf16"), (80, "bf16"),
        (79, "f16"), (75, "f16"), (72, "f16"), (70, "f16"), (60, "f16"),
        (69, "f32"), (62, "f32"), (61, "f32"), (52, "f32"), (0, "f32"),
    ],
)  # fmt: skip
def test_a_cuda_device_gets_the_type_of_its_generation(sm: int, kind: str) -> None:
    assert cuda_precision(sm).type == kind


@pytest.mark.parametrize(
    ("gfx", "kind"),
    [
        ("gfx90a", "bf16"), ("gfx942", "bf16"), ("gfx950", "bf16"), ("gfx1100", "bf16"),
        ("gfx1151", "bf16"), ("gfx1200", "bf16"), ("gfx1201", "bf16"),
        ("gfx900", "f16"), ("gfx906", "f16"), ("gfx908", "f16"), ("gfx1010", "f16"),
        ("gfx1030", "f16"), ("gfx803", "f32"), ("", "f32"),
    ],
)  # fmt: skip
def test_a_hip_device_gets_the_type_of_its_architecture(gfx: str, kind: str) -> None:
    assert hip_precision(gfx).type == kind


def test_rows_that_no_device_has_run_are_marked() -> None:
    assert not device_precision(cpu(8)).planned_only
    assert not cuda_precision(90).planned_only
    for precision in (*map(cuda_precision, (75, 60, 61)), *map(hip_precision, ("gfx1100", ""))):
        assert precision.planned_only
        assert precision.explained == f"{precision.reason}, planned only"
    assert cuda_precision(90).explained == cuda_precision(90).reason
    assert common_precision([gpu(24, sm=90), gpu(24, sm=75)]).planned_only
    assert not common_precision([gpu(24, sm=90), cpu(8)]).planned_only


def test_every_choice_comes_with_its_reason() -> None:
    assert cuda_precision(75).reason == "CUDA sm70 to sm79 compute in f16"
    assert hip_precision("gfx1100").reason == "HIP gfx1100 computes in bf16"
    assert device_precision(cpu(8)).reason == (
        "CPUs compute in f32, and multiply packed weights in int24"
    )


@pytest.mark.parametrize(
    ("sms", "kind"),
    [((90, 86), "bf16"), ((90, 75), "f16"), ((75, 61), "f32"), ((90, 75, 52), "f32")],
)
def test_several_devices_take_the_weakest_type(sms: tuple[int, ...], kind: str) -> None:
    choice = common_precision([gpu(24, sm=sm) for sm in sms])
    assert choice.type == kind
    assert ("together" in choice.reason) == (len({cuda_precision(sm) for sm in sms}) > 1)


def test_a_gpu_beside_a_cpu_takes_f32() -> None:
    assert common_precision([gpu(24), cpu(8)]).type == "f32"
