"""Precision: which types a device computes and stages in, and why; pure tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.errors import OptionError, PlanError
from headroom.formats.quants import BY_NAME
from headroom.machine.devices import DeviceSpec
from headroom.options import ACTIVATION_TYPES

_STRENGTH = {"f32": 0, "f16": 1, "bf16": 2}  # several devices take the weakest type present
_HIP_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_HIP_F16 = ("gfx9", "gfx10")


@dataclass(frozen=True, slots=True)
class Precision:
    """The type of activations between layers and devices, with the reason."""

    activation: str  # "f32", "f16" or "bf16"
    reason: str


def cuda_precision(sm: int) -> Precision:
    """Return the activation type of an NVIDIA GPU; `sm` is 10 x major + minor, 0 if unknown."""
    if sm >= 80:
        return Precision("bf16", "CUDA sm80 and later compute in bf16")
    if 70 <= sm <= 79:
        return Precision("f16", "CUDA sm70 to sm79 compute in f16")
    if sm == 60:
        return Precision("f16", "CUDA sm60 (GP100) computes in f16")
    return Precision("f32", "older or unknown CUDA devices compute in f32")


def hip_precision(gfx: str) -> Precision:
    """Return the activation type of an AMD GPU by its gfx name, "" if unknown."""
    # bf16 names come first: gfx9 is also the start of gfx90a.
    if gfx.startswith(_HIP_BF16):
        return Precision("bf16", f"HIP {gfx} computes in bf16")
    if gfx.startswith(_HIP_F16):
        return Precision("f16", f"HIP {gfx} computes in f16")
    return Precision("f32", "older or unknown HIP devices compute in f32")


def device_precision(device: DeviceSpec) -> Precision:
    """Return the activation type of one device."""
    if device.kind == "cuda":
        return cuda_precision(device.sm)
    if device.kind == "hip":
        return hip_precision(device.gfx)
    if device.kind == "cpu":
        return Precision("f32", "CPUs compute in f32")
    return Precision("f32", "f32 runs everywhere")


def common_precision(choices: Sequence[Precision]) -> Precision:
    """Return the weakest type of several devices, so that all of them can run it."""
    weakest = min(choices, key=lambda choice: _STRENGTH[choice.activation])
    if len({choice.activation for choice in choices}) == 1:
        return weakest
    return Precision(
        weakest.activation, f"the weakest type of the devices together ({weakest.reason})"
    )


def choose_precision(devices: Sequence[DeviceSpec], override: str | None = None) -> Precision:
    """Return the type for all devices together, or the override as it stands."""
    if override is None:
        return common_precision([device_precision(device) for device in devices])
    if override not in ACTIVATION_TYPES:
        raise OptionError(
            f"The activation type is {override!r}.",
            hint=f"Choose from {', '.join(ACTIVATION_TYPES)}.",
            param="activation_dtype",
        )
    return Precision(override, "set by --activation-dtype")


def type_bytes(name: str, values: int) -> int:
    """Return the bytes of `values` values in a type."""
    return BY_NAME[name].bytes_for(values)


def staging_bytes(hidden: int, rows: int, activation: str, buffers: int = 2) -> int:
    """Return the bytes of the buffers that carry rows between layers and devices."""
    return type_bytes(activation, hidden) * rows * buffers


def feature_ring_bytes(rows: int, width: int, feature_type: str) -> int:
    """Return the bytes of a ring of `rows` tapped features, each `width` values wide."""
    return checked_row_bytes(feature_type, width, "a feature row") * rows


def checked_row_bytes(name: str, values: int, what: str) -> int:
    """Return the bytes of one row in a type, which must divide the row into whole blocks."""
    block = BY_NAME[name].block
    if values % block:
        raise PlanError(
            f"{what} has {values} values, which are not whole {name} blocks of {block}.",
            hint="Choose f32, f16 or bf16 for it.",
        )
    return type_bytes(name, values)
