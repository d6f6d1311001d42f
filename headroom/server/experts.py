"""GET /experts: how often each routed expert was picked, which are hot, and the hit rate."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from headroom.engine.engine import ExpertView
from headroom.errors import CapacityError
from headroom.server.service import Service

router = APIRouter()

WAIT_S = 10.0  # for the end of the step under way


@router.get("/experts", response_model=None)
async def show_experts(request: Request) -> dict[str, Any]:
    """Return the current state of a model's experts, without loading the model.

    The size of the answer is fixed by the model: a number and a letter for each routed expert.
    """
    service: Service = request.app.state.service
    shelved = service.find_shelved(request.query_params.get("model"))
    asked = None if shelved.llm is None else shelved.llm.engine.view_experts()
    found: dict[str, Any] = {"model": shelved.name, "loaded": shelved.llm is not None}
    if asked is None:
        return {**found, "layers": []}
    taken = asyncio.wrap_future(asked)
    done, _ = await asyncio.wait({taken}, timeout=WAIT_S)
    if not done:
        raise CapacityError(
            f"The engine is busy with a step that takes more than {WAIT_S:.0f} s.",
            hint="Try again later.",
        )
    return found | _json(taken.result())


def _json(view: ExpertView) -> dict[str, Any]:
    told = view.telemetry
    return {
        **told.summary(),
        "tokens": told.tokens,
        "picks": sum(told.picks),
        "hits": sum(told.hits),
        "layers": [
            {
                "layer": index,
                "used": layer.used,
                "hits": told.hits[index],
                "picks": list(layer.picks),
                "hot": _letters(layer.hot),
            }
            for index, layer in enumerate(view.layers)
            if layer.picks
        ],
    }


def _letters(hot: Sequence[bool]) -> str:
    return "".join("h" if expert else "c" for expert in hot)
