"""GET and DELETE /v1/cache: the prompts whose beginnings are kept for later requests."""

import asyncio
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from headroom.engine.prefixes import PrefixEntries
from headroom.errors import CapacityError
from headroom.plan.settings import PAGE_SIZE
from headroom.server.request_log import current_record
from headroom.server.service import Service

router = APIRouter()

T = TypeVar("T")
WAIT_S = 10.0  # for the end of the step under way


@router.get("/v1/cache", response_model=None)
async def list_prefixes(request: Request) -> dict[str, Any]:
    """Return what is kept of the prompts of the client's key, without loading a model."""
    service: Service = request.app.state.service
    shelved = service.find_shelved(request.query_params.get("model"))
    entries = PrefixEntries(kept=[], page_bytes=0, stored=[])
    if shelved.llm is not None:
        entries = await _taken(shelved.llm.engine.list_prefixes(current_record().owner))
    return {"object": "list", "model": shelved.name, "data": _json(entries)}


@router.delete("/v1/cache", response_model=None)
async def forget_prefixes(request: Request) -> dict[str, Any]:
    """Forget the prompts of the client's key, in memory and in files."""
    service: Service = request.app.state.service
    shelved = service.find_shelved(request.query_params.get("model"))
    pages = 0
    if shelved.llm is not None:
        pages = await _taken(shelved.llm.engine.forget_prefixes(current_record().owner))
    return {"object": "cache.deleted", "model": shelved.name, "tokens": pages * PAGE_SIZE}


async def _taken(asked: "Future[T]") -> T:
    taken = asyncio.wrap_future(asked)
    done, _ = await asyncio.wait({taken}, timeout=WAIT_S)
    if not done:
        raise CapacityError(
            f"The engine is busy with a step that takes more than {WAIT_S:.0f} s.",
            hint="Try again later.",
        )
    return taken.result()


def _json(entries: PrefixEntries) -> list[dict[str, Any]]:
    """Return the prefixes that were used last, first."""
    each = entries.page_bytes
    found: list[dict[str, Any]] = [
        {
            "tier": "host" if entry.host_pages else "device",
            "tokens": entry.tokens,
            "bytes": entry.pages * each,
            "snapshots": entry.snapshots,
            "idle_seconds": round(entry.idle_s, 3),
        }
        for entry in entries.kept
    ]
    found += [
        {
            "tier": "disk",
            "tokens": stored.tokens,
            "bytes": stored.size_bytes,
            "snapshots": stored.snapshots,
            "idle_seconds": round(stored.idle_s, 3),
        }
        for stored in entries.stored
    ]
    return sorted(found, key=lambda entry: entry["idle_seconds"])
