"""Other programs' settings that come nearest to a plan."""

import math
import re
import shlex
from pathlib import Path

from headroom.plan.plan import Plan


def llama_server_command(plan: Plan, model_path: Path | None) -> str:
    """Return the llama-server command that comes nearest to a plan.

    Without the path of a GGUF file, the command names the file as people would call it.
    Slots of llama-server share one context, and it can only move the experts of whole layers.
    For another machine, whose cores are unknown, the flag for threads is left out unless --threads
    is given.
    """
    settings = plan.settings
    flags = [
        "llama-server",
        f"-m {shlex.quote(str(model_path or likely_file(plan)))}",
        f"-c {settings.context * settings.parallel}",
        f"-np {settings.parallel}",
        f"-b {max(settings.chunk, 32)} -ub {max(settings.chunk, 32)}",
        f"-ctk {settings.k_type} -ctv {settings.v_type}",
    ]
    if plan.known_threads is not None:
        flags.append(f"-t {plan.known_threads}")
    gpus = [device for device in plan.devices if device.kind != "cpu"]
    layers = sum(device.layers[1] - device.layers[0] + 1 for device in gpus)
    flags.append(f"-ngl {layers + 1 if layers and len(gpus) == len(plan.devices) else layers}")
    if len(gpus) > 1:
        shares = (str(device.layers[1] - device.layers[0] + 1) for device in gpus)
        flags.append(f"-ts {','.join(shares)}")
    if cold := _layers_with_cold_experts(plan):
        flags.append(f"--n-cpu-moe {cold}")
    return " ".join(flags)


def likely_file(plan: Plan) -> str:
    """Return what a GGUF file of the model would be called: qwen3-0.6b-q4_k_m.gguf."""
    return re.sub(r"[^\w.-]+", "-", plan.model).strip("-") + ".gguf"


def _layers_with_cold_experts(plan: Plan) -> int:
    """Return how many layers must keep all experts on the host to hold no more than planned."""
    total = sum(device.total_experts for device in plan.devices)
    hot = sum(device.hot_experts for device in plan.devices)
    layers = sum(len(device.hot_by_layer) for device in plan.devices)
    return math.ceil((total - hot) / total * layers) if total else 0
