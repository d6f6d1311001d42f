"""Ollama's API about models: GET /api/tags, /api/ps and /api/version, POST /api/show and /api/pull.

Nothing is downloaded, copied or deleted: the models are those that the server was started with.
"""

import hashlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from headroom.server.model_card import ModelCard
from headroom.server.ollama import LineStream, as_line
from headroom.server.ollama_bodies import ModelBody
from headroom.server.schemas import read_body
from headroom.server.service import Service
from headroom.server.shelf import LATEST, NEVER, Place

router = APIRouter()

API_VERSION = "0.13.5"  # of Ollama: clients ask whether the server is new enough for a feature
STAYS = timedelta(days=365 * 100)  # how far ahead a model expires that stays loaded


class PullBody(ModelBody):
    """The body of /api/pull."""

    stream: bool | None = None  # left out: true


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Answer with the version of Ollama whose API this is."""
    return {"version": API_VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List all models, loaded or not."""
    service: Service = request.app.state.service
    started = request.app.state.created
    return {"models": [_listed(place, started) for place in service.shelf.places]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """List the models that are loaded."""
    service: Service = request.app.state.service
    loaded = [place for place in service.shelf.places if place.llm is not None]
    return {"models": [_running(place) for place in loaded]}


@router.post("/api/show", response_model=None)
async def show(request: Request) -> dict[str, Any]:
    """Describe a model; it is not loaded for that."""
    service: Service = request.app.state.service
    body = await read_body(request, ModelBody, service.options.max_body)
    place = service.place(body.model)
    card = place.card
    parameters = "" if place.context is None else f"num_ctx {place.context}"
    return {
        "modelfile": f"FROM {tag(place.name)}\n",
        "parameters": parameters,
        "template": card.chat_template or "",
        "details": _details(card),
        "model_info": {"general.parameter_count": card.parameters, **card.metadata},
        "capabilities": _capabilities(place),
        "modified_at": _time(card.changed or request.app.state.created),
    }


@router.post("/api/pull", response_model=None)
async def pull(request: Request) -> Response:
    """Say that a model is there; a model that is not there is refused, not downloaded."""
    service: Service = request.app.state.service
    body = await read_body(request, PullBody, service.options.max_body)
    service.place(body.model)
    if body.stream is False:
        return JSONResponse({"status": "success"})

    async def lines() -> AsyncGenerator[bytes, None]:
        for status in ("pulling manifest", "success"):
            yield as_line({"status": status})

    return StreamingResponse(lines(), media_type=LineStream.media_type)


def tag(name: str) -> str:
    """Return a model's name as Ollama lists it: with a tag."""
    return name if ":" in name else name + LATEST


def _listed(place: Place, started: float) -> dict[str, Any]:
    card = place.card
    return {
        "name": tag(place.name),
        "model": tag(place.name),
        "modified_at": _time(card.changed or started),
        "size": card.size_bytes,
        "digest": _digest(card),
        "details": _details(card),
    }


def _running(place: Place) -> dict[str, Any]:
    taken = place.taken or {}
    on_gpus = sum(size for device, size in taken.items() if device != "cpu")
    left_s = place.idle_left_s
    expires = datetime.now(UTC) + (STAYS if left_s == NEVER else timedelta(seconds=left_s))
    return {
        "name": tag(place.name),
        "model": tag(place.name),
        "size": sum(taken.values()),
        "digest": _digest(place.card),
        "details": _details(place.card),
        "expires_at": expires.isoformat().replace("+00:00", "Z"),
        "size_vram": on_gpus,
        "context_length": place.context,
    }


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": _counted(card.parameters),
        "quantization_level": card.quant.upper(),
    }


def _counted(parameters: int) -> str:
    """Return a number of parameters as Ollama writes it, such as 134.52M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.4g}{unit}"
    return str(parameters)


def _capabilities(place: Place) -> list[str]:
    found = ["completion", "embedding"]
    template = place.card.chat_template
    if template is None and place.llm is not None:
        known = place.llm.template
        template = None if known is None else known.source
    if template and "tools" in template:
        found.append("tools")
    if place.thinks:
        found.append("thinking")
    if place.llm is not None and place.llm.fill_in is not None:
        found.append("insert")
    return found


def _digest(card: ModelCard) -> str:
    return hashlib.sha256(f"{card.name} {card.digest}".encode()).hexdigest()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
