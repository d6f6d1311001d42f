"""The precision tables, row by row, and the formulas that hang on them."""

import pytest

from headroom.errors import OptionError, PlanError
from headroom.machine.precision import (
    choose_precision,
    common_precision,
    cuda_precision,
    device_precision,
    feature_ring_bytes,
    hip_precision,
    staging_bytes,
)
from headroom.units import GIB, MIB
from tests.plan.shapes import cpu, gpu


@pytest.mark.parametrize(
    ("sm", "activation"),
    [
        (120, "bf16"), (90, "bf16"), (89, "bf16"), (86, "bf16"), (80, "bf16"),
        (79, "f16"), (75, "f16"), (72, "f16"), (70, "f16"), (60, "f16"),
        (69, "f32"), (62, "f32"), (61, "f32"), (52, "f32"), (0, "f32"),
    ],
)  # fmt: skip
def test_a_cuda_device_gets_the_type_of_its_generation(sm: int, activation: str) -> None:
    assert cuda_precision(sm).activation == activation


@pytest.mark.parametrize(
    ("gfx", "activation"),
    [
        ("gfx90a", "bf16"), ("gfx942", "bf16"), ("gfx950", "bf16"), ("gfx1100", "bf16"),
        ("gfx1151", "bf16"), ("gfx1200", "bf16"), ("gfx1201", "bf16"),
        ("gfx900", "f16"), ("gfx906", "f16"), ("gfx908", "f16"), ("gfx1010", "f16"),
        ("gfx1030", "f16"), ("gfx803", "f32"), ("", "f32"),
    ],
)  # fmt: skip
def test_a_hip_device_gets_the_type_of_its_architecture(gfx: str, activation: str) -> None:
    assert hip_precision(gfx).activation == activation


def test_every_choice_comes_with_its_reason() -> None:
    assert cuda_precision(75).reason == "CUDA sm70 to sm79 compute in f16"
    assert hip_precision("gfx1100").reason == "HIP gfx1100 computes in bf16"
    assert device_precision(cpu(8)).reason == "CPUs compute in f32"


@pytest.mark.parametrize(
    ("sms", "activation"),
    [((90, 86), "bf16"), ((90, 75), "f16"), ((75, 61), "f32"), ((90, 75, 52), "f32")],
)
def test_several_devices_take_the_weakest_type(sms: tuple[int, ...], activation: str) -> None:
    choice = common_precision([cuda_precision(sm) for sm in sms])
    assert choice.activation == activation
    assert ("together" in choice.reason) == (len({cuda_precision(sm) for sm in sms}) > 1)


def test_a_gpu_beside_a_cpu_takes_f32() -> None:
    assert choose_precision([gpu(24), cpu(8)]).activation == "f32"


def test_an_override_beats_the_table_and_a_wrong_one_lists_the_right_ones() -> None:
    assert choose_precision([cpu(8)], "bf16").activation == "bf16"
    with pytest.raises(OptionError, match="Choose from f32, bf16, f16"):
        choose_precision([cpu(8)], "fp8")


@pytest.mark.parametrize(
    ("hidden", "buffers", "f32_mib", "half_mib", "chunked_mib"),
    [(5120, 2, 10240, 5120, 20), (2048, 2, 4096, 2048, 8), (5376, 3, 16128, 8064, 31.5)],
)
def test_staging_has_its_published_size(
    hidden: int, buffers: int, f32_mib: float, half_mib: float, chunked_mib: float
) -> None:
    assert staging_bytes(hidden, 262144, "f32", buffers) == f32_mib * MIB
    assert staging_bytes(hidden, 262144, "bf16", buffers) == half_mib * MIB
    assert staging_bytes(hidden, 262144, "f16", buffers) == half_mib * MIB
    assert staging_bytes(hidden, 512, "f32", buffers) == chunked_mib * MIB


@pytest.mark.parametrize(
    ("feature_type", "gibibytes", "small_mib"),
    [("f32", 25.0, 400), ("f16", 12.5, 200), ("bf16", 12.5, 200), ("q8_0", 6.640625, 106.25)],
)
def test_a_feature_ring_has_its_published_size(
    feature_type: str, gibibytes: float, small_mib: float
) -> None:
    assert feature_ring_bytes(262144, 25600, feature_type) == gibibytes * GIB
    assert feature_ring_bytes(4096, 25600, feature_type) == small_mib * MIB


def test_a_feature_row_must_be_whole_blocks() -> None:
    with pytest.raises(PlanError, match="has 100 values, which are not whole q8_0 blocks of 32"):
        feature_ring_bytes(16, 100, "q8_0")
