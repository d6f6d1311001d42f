"""A plan as versioned JSON."""

from collections.abc import Sequence
from typing import Any

from headroom.plan.lines import Line
from headroom.plan.plan import Plan
from headroom.plan.settings import PlanSettings

JSON_VERSION = 1


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data; the keys are an interface and carry a version."""
    predicted = plan.predicted
    return {
        "version": JSON_VERSION,
        "model": plan.model,
        "fits": plan.fits,
        "settings": _settings_json(plan.settings, plan.known_threads),
        "devices": [
            {
                "name": device.name,
                "total_bytes": device.total_bytes,
                "lines": _lines_json(device.lines),
                "free_bytes": device.free_bytes,
                "layers": list(device.layers),
                "k_type": device.settings.k_type,
                "v_type": device.settings.v_type,
                "dtype": device.settings.compute_type,
                "hot_experts": device.hot_experts,
                "total_experts": device.total_experts,
            }
            for device in plan.devices
        ],
        "host": {
            "total_bytes": plan.host.total_bytes,
            "lines": _lines_json(plan.host.lines),
            "free_bytes": plan.host.free_bytes,
        },
        "precision": {
            "activation": plan.precision.type,
            "reason": plan.precision.reason,
            "planned_only": plan.precision.planned_only,
        },
        "lossy": list(plan.lossy),
        "notes": list(plan.notes),
        "predicted": {
            "decode_tokens_per_s": round(predicted.decode_tokens_per_s, 2),
            "prefill_tokens_per_s": round(predicted.prefill_tokens_per_s, 2),
            "bound_by": predicted.bound_by,
            "estimate": predicted.estimate,
            "stages": [
                {
                    "device": stage.device,
                    "decode_s": round(stage.decode_s, 9),
                    "prefill_s": round(stage.prefill_s, 9),
                    "decode_share": round(predicted.decode_share(stage), 4),
                }
                for stage in predicted.stages
            ],
        },
    }


def _lines_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [{"name": line.name, "bytes": line.bytes, "why": line.why} for line in lines]


def _settings_json(settings: PlanSettings, threads: int | None) -> dict[str, Any]:
    return {
        "context": settings.context,
        "parallel": settings.parallel,
        "chunk": settings.chunk,
        "cache_tokens": settings.cache_tokens,
        "page_size": settings.page_size,
        "pages": settings.pages,
        "k_type": settings.k_type,
        "v_type": settings.v_type,
        "dtype": settings.compute_type,
        "activation": settings.handover_type,
        "weights": settings.weights,
        "threads": threads,
        "pin_threads": settings.pin_threads,
    }
