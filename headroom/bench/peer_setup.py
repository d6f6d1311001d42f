"""PeerSetup: flags and environment that make llama-bench run as a plan does."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from headroom.errors import OptionError
from headroom.options import Options, child_environment
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape

# Of its cache, for ours: f16 is as wide as bf16 and what it is fastest with; f32 it refuses.
CACHE_TYPES = {"bf16": "f16", "f32": "f16"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """How llama-bench runs, and where that is not quite as we do."""

    flags: tuple[str, ...]
    visible: str  # GPUs that it may see, as CUDA_VISIBLE_DEVICES has them; "": none
    context: int  # tokens that a sequence of ours holds
    chunk: int  # tokens of a prompt in one step
    notes: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The environment that it is started in."""
        return child_environment({VISIBLE: self.visible})


def setup_peer(plan: Plan, shape: ModelShape, options: Options) -> PeerSetup:
    """Return how llama-bench runs beside a plan, or refuse a plan that it has nothing like."""
    device, settings, notes = plan.devices[0], plan.settings, []
    on_gpu = device.kind != "cpu"
    if on_gpu and options.device_memory is not None:
        if not device.total_experts:
            raise OptionError(
                "llama-bench takes no --device-memory, and a dense model has no experts to leave "
                "in host memory.",
                hint="Leave out --device-memory, or --compare.",
                param="compare",
            )
        notes.append("--device-memory limits headroom alone; llama-bench has the whole GPU")
    flags = ["-ngl", "99" if on_gpu else "0"]
    if layers := cold_layers(plan, shape):
        flags += ["-ncmoe", str(layers)]
        theirs = sum(layer.experts for layer in shape.layers[:layers]) / device.total_experts
        ours = 1 - device.hot_experts / device.total_experts
        how = "cold" if settings.cold != "drop" else "left out and computed by nobody"
        notes.append(
            f"llama-bench has all experts of its first {layers} layers on the CPU (-ncmoe "
            f"{layers}), {100 * theirs:.0f} % of them; of ours {100 * ours:.0f} % are {how}, some "
            "of every layer"
        )
    wanted = settings.k_type, settings.v_type
    keys, values = (CACHE_TYPES.get(name, name) for name in wanted)
    if "f32" in wanted:
        notes.append("llama-bench has its cache in f16, where ours is f32, which it does not take")
    flags += ["-t", str(settings.threads), "-fa", "1", "-ctk", keys, "-ctv", values]
    visible = visible_gpu(device.name, child_environment({})) if on_gpu else ""
    return PeerSetup(tuple(flags), visible, settings.context, settings.chunk, tuple(notes))


def cold_layers(plan: Plan, shape: ModelShape) -> int:
    """Return how many of the first layers have as many experts as are cold in all, nearly.

    llama-bench keeps the experts of whole layers on the CPU, from the first one on.
    """
    device = plan.devices[0]
    cold = device.total_experts - device.hot_experts
    if device.kind == "cpu" or cold <= 0:
        return 0
    sums = list(accumulate(layer.experts for layer in shape.layers))
    return 1 + min(
        (at for at, layer in enumerate(shape.layers) if layer.experts),
        key=lambda at: abs(sums[at] - cold),
    )


def visible_gpu(name: str, environment: Mapping[str, str]) -> str:
    """Return what shows a program only the GPU that torch calls `cuda:1`.

    Torch counts what CUDA_VISIBLE_DEVICES leaves it, from 0 on; so do other programs.
    """
    index = int(name.rpartition(":")[2])
    listed = [word.strip() for word in environment.get(VISIBLE, "").split(",") if word.strip()]
    return listed[index] if index < len(listed) else str(index)


def check_comparable(model: Path) -> None:
    """Refuse a model that the peer cannot read."""
    if model.suffix != ".gguf" or not os.access(model, os.R_OK):
        raise OptionError(f"llama-bench reads .gguf files, and {model} is none.", param="compare")
