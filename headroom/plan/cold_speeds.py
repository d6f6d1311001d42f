"""ColdSpeeds: how fast a machine works off experts that are not in GPU memory."""

from dataclasses import dataclass, replace
from typing import Literal

from headroom.machine.devices import LISTED_SHARE, DeviceSpec

ASSUMED_HANDOVER_S = 10e-6  # until the machine is measured
# Until then, too: of the speed of large plain products, what a CPU's expert kernels reach on tiles
# of four bits with eight rows each. 26 of 144 GFLOP/s of one core, once, beside other work.
EXPERTS_SHARE = 0.2

Worker = Literal["link", "cpu", "both"]  # who is busy with cold experts


@dataclass(frozen=True, slots=True)
class ColdSpeeds:
    """What a machine reaches with experts, in bytes per second, and how quick an answer is."""

    gpu: float  # of the GPU's own memory
    link: float  # kernels of the GPU that read host memory; 0: they cannot
    cpu: float  # the CPU's expert kernels on host memory; 0: there are none
    handover_s: float  # an empty request of the CPU and its answer
    copy: float = 0.0  # copies from host memory to the GPU
    cpu_flops: float = 0.0  # operations per second of the CPU's expert kernels, some rows each
    measured: bool = False  # on this machine, by headroom calibrate


def speeds_of(gpu: DeviceSpec, host: DeviceSpec) -> ColdSpeeds:
    """Return what was measured, and what is to be expected where it was not."""
    device_share = 1.0 if gpu.measured else LISTED_SHARE
    host_share = 1.0 if host.measured else LISTED_SHARE
    copy = gpu.link * device_share
    experts = host.experts or host.bandwidth * host_share
    return ColdSpeeds(
        gpu=gpu.bandwidth * device_share,
        link=gpu.link_read or copy,
        cpu=experts if host.native else 0.0,
        handover_s=gpu.handover_s or ASSUMED_HANDOVER_S,
        copy=copy,
        cpu_flops=host.expert_flops or EXPERTS_SHARE * host.flops * host_share,
        measured=bool(gpu.link_read and host.experts),
    )


def usable_speeds(speeds: ColdSpeeds, cold: str, pinned: bool) -> ColdSpeeds:
    """Return the speeds of those who may compute cold experts in small steps, 0 of the others."""
    link = speeds.link if pinned and cold != "cpu" else 0.0
    return replace(speeds, link=link, cpu=0.0 if cold == "gpu" else speeds.cpu)


def layer_seconds(speeds: ColdSpeeds, cold_bytes: float) -> tuple[Worker, float]:
    """Return who works off a layer's cold experts in a step of one row, and how long.

    Both work at once, so that their rates add up from the time when the CPU was reached.
    """
    if not speeds.cpu:
        return "link", cold_bytes / (speeds.link or speeds.copy)
    if not speeds.link:
        return "cpu", speeds.handover_s + cold_bytes / speeds.cpu
    alone = cold_bytes / speeds.link
    if alone <= speeds.handover_s:
        return "link", alone
    reached = speeds.cpu * speeds.handover_s
    return "both", (cold_bytes + reached) / (speeds.link + speeds.cpu)
