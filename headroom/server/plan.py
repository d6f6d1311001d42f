"""GET /plan: where the memory of a model goes, and how much of it is in use."""

from typing import Any

from fastapi import APIRouter, Request

from headroom.engine.engine import Engine
from headroom.plan.show.report import plan_json
from headroom.server.refusals import RefusalError
from headroom.server.service import Service
from headroom.server.shelf import not_loaded

router = APIRouter()


@router.get("/plan", response_model=None)
async def show_plan(request: Request) -> dict[str, Any]:
    """Return the plan of a model as `headroom plan --json` writes it; the model is not loaded."""
    service: Service = request.app.state.service
    shelved = service.find_shelved(request.query_params.get("model"))
    llm = shelved.llm
    plan = shelved.card.plan if llm is None else llm.plan
    if plan is None:
        if shelved.card.error is not None:
            raise not_loaded(shelved, shelved.card.error)
        raise RefusalError(
            503,
            "model_not_loaded",
            f"The model {shelved.name!r} has no plan before it is first loaded.",
            hint="Send it a message, then ask again.",
            param="model",
        )
    in_use = None if llm is None else _in_use(llm.engine)
    return {**plan_json(plan), "name": shelved.name, "in_use": in_use}


def _in_use(engine: Engine) -> dict[str, Any]:
    stats = engine.stats()
    return {
        "memory": [
            {
                "device": memory.device,
                "planned_bytes": memory.planned_bytes,
                "used_bytes": memory.used_bytes,
            }
            for memory in stats.memory
        ],
        "cache_pages": stats.cache_pages_total,
        "cache_pages_used": stats.cache_pages_used,
        "requests_running": stats.requests_running,
        "requests_waiting": stats.requests_waiting,
    }
