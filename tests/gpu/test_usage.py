"""What a process takes of a GPU is counted from before CUDA starts, whatever others hold."""

from unittest.mock import patch

from headroom.machine.drivers import read_gpus
from headroom.machine.gpus import nvidia_specs
from headroom.units import MIB
from tests.gpu import usage
from tests.gpu.usage import Usage, free_by_driver

REPORT = (
    "NVIDIA H200, 143771, {free}, 9.0, 580.1, GPU-a\nNVIDIA H200, 143771, 5, 9.0, 580.1, GPU-b\n"
)


def test_the_drivers_report_says_what_is_free_before_cuda_starts() -> None:
    found = nvidia_specs(read_gpus(REPORT.format(free=143000), {}))
    with patch.object(usage, "detect_gpus", lambda: found):
        assert free_by_driver() == 143000 * MIB
    with patch.object(usage, "detect_gpus", list):
        assert free_by_driver() is None


def test_what_others_hold_is_not_counted_and_cudas_start_is() -> None:
    free = [1000]
    counted = Usage(lambda: free[0], lambda: 1 // 0)
    assert counted.whole
    free[0] = 700
    assert counted.taken() == 300


def test_without_a_report_it_counts_from_cudas_start() -> None:
    free = [800]
    counted = Usage(lambda: None, lambda: free[0])
    assert not counted.whole
    free[0] = 650
    assert counted.taken() == 150
