"""ColdSpeeds: how fast a machine works off experts that are not in GPU memory."""

from dataclasses import dataclass

from headroom.memory.cost import LISTED_SHARE
from headroom.memory.devices import DeviceSpec

ASSUMED_HANDOVER_S = 10e-6  # until the machine is measured


@dataclass(frozen=True, slots=True)
class ColdSpeeds:
    """What a machine reaches with experts, in bytes per second, and how quick an answer is."""

    gpu: float  # of the GPU's own memory
    link: float  # kernels of the GPU that read host memory; 0: they cannot
    cpu: float  # the CPU's expert kernels on host memory; 0: there are none
    handover_s: float  # an empty request of the CPU and its answer
    copy: float = 0.0  # copies from host memory to the GPU
    cpu_flops: float = 0.0  # operations per second of the CPU's products
    measured: bool = False  # on this machine, by headroom calibrate


def speeds_of(gpu: DeviceSpec, host: DeviceSpec) -> ColdSpeeds:
    """Return what was measured, and what is to be expected where it was not."""
    copy = gpu.link if gpu.measured else gpu.link * LISTED_SHARE
    experts = host.experts or host.bandwidth * (1.0 if host.measured else LISTED_SHARE)
    return ColdSpeeds(
        gpu=gpu.bandwidth,
        link=gpu.link_read or copy,
        cpu=experts if host.native else 0.0,
        handover_s=gpu.handover_s or ASSUMED_HANDOVER_S,
        copy=copy,
        cpu_flops=host.flops if host.measured else host.flops * LISTED_SHARE,
        measured=bool(gpu.link_read and host.experts),
    )
