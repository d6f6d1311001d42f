"""Precision policy: the floating-point type for each kind of device, and why; pure tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.kernels.cuda.sizes import BF16_SM
from headroom.machine.devices import DeviceSpec

_STRENGTH = {"f32": 0, "f16": 1, "bf16": 2}  # several devices take the weakest type present
_HIP_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_HIP_F16 = ("gfx9", "gfx10")


@dataclass(frozen=True, slots=True)
class Precision:
    """The policy's type for a device: its default for computing, KV cache and hand-over of rows.

    `--dtype`, `--kv-type` and `--activation-dtype` override one use of it each.
    """

    type: str  # "f32", "f16" or "bf16"
    reason: str
    planned_only: bool = False  # no device of this row of the policy has run headroom yet

    @property
    def explained(self) -> str:
        """The reason, and whether it is a plan that nothing has confirmed."""
        return f"{self.reason}, planned only" if self.planned_only else self.reason


def cuda_precision(sm: int) -> Precision:
    """Return the type of an NVIDIA GPU; `sm` is 10 x major + minor, 0 if unknown."""
    if sm >= BF16_SM:
        return Precision("bf16", "CUDA sm80 and later compute in bf16")
    if 70 <= sm <= 79:
        return Precision("f16", "CUDA sm70 to sm79 compute in f16", planned_only=True)
    if sm == 60:
        return Precision("f16", "CUDA sm60 (GP100) computes in f16", planned_only=True)
    return Precision("f32", "older or unknown CUDA devices compute in f32", planned_only=True)


def hip_precision(gfx: str) -> Precision:
    """Return the type of an AMD GPU by its gfx name, "" if unknown."""
    # bf16 names come first: gfx9 is also the start of gfx90a.
    if gfx.startswith(_HIP_BF16):
        return Precision("bf16", f"HIP {gfx} computes in bf16", planned_only=True)
    if gfx.startswith(_HIP_F16):
        return Precision("f16", f"HIP {gfx} computes in f16", planned_only=True)
    return Precision("f32", "older or unknown HIP devices compute in f32", planned_only=True)


def device_precision(device: DeviceSpec) -> Precision:
    """Return the type of one device."""
    if device.kind == "cuda":
        return cuda_precision(device.sm)
    if device.kind == "hip":
        return hip_precision(device.gfx)
    if device.kind == "cpu":
        return Precision("f32", "CPUs compute in f32, and multiply packed weights in int24")
    return Precision("f32", "f32 runs everywhere")


def common_precision(devices: Sequence[DeviceSpec]) -> Precision:
    """Return the weakest type of several devices, which all of them can run."""
    choices = [device_precision(device) for device in devices]
    weakest = min(choices, key=lambda choice: _STRENGTH[choice.type])
    if len({choice.type for choice in choices}) == 1:
        return weakest
    return Precision(
        weakest.type,
        f"the weakest type of the devices together ({weakest.reason})",
        planned_only=any(choice.planned_only for choice in choices),
    )
