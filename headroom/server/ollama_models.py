"""Ollama's API about models: GET /api/tags, /api/ps and /api/version, POST /api/show and /api/pull.

The models are those that the server was started with: none is downloaded, copied or deleted.
"""

import hashlib
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from headroom.server.json_values import JSONResponse
from headroom.server.model_card import HOST, ModelCard
from headroom.server.ollama import LineStream, as_line
from headroom.server.ollama_bodies import ModelBody
from headroom.server.schemas import read_body
from headroom.server.service import Service
from headroom.server.shelf import LATEST, NEVER, ShelvedModel

router = APIRouter()

API_VERSION = "0.13.5"  # of Ollama: clients ask whether the server is new enough for a feature
STAYS = timedelta(days=365 * 100)  # until a model that stays loaded is said to expire


class PullBody(ModelBody):
    """The body of /api/pull."""

    stream: bool | None = None  # left out: true


@router.api_route("/api/version", methods=["GET", "HEAD"])
async def version() -> dict[str, str]:
    """Answer with the version of Ollama whose API this is."""
    return {"version": API_VERSION}


@router.api_route("/api/tags", methods=["GET", "HEAD"])
async def tags(request: Request) -> dict[str, Any]:
    """List all models, loaded or not."""
    service: Service = request.app.state.service
    started = request.app.state.created
    return {"models": [_listed(shelved, started) for shelved in service.shelf.models]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """List the models that are loaded."""
    service: Service = request.app.state.service
    loaded = [shelved for shelved in service.shelf.models if shelved.llm is not None]
    return {"models": [_running(shelved) for shelved in loaded]}


@router.post("/api/show", response_model=None)
async def show(request: Request) -> dict[str, Any]:
    """Describe a model, without loading it."""
    service: Service = request.app.state.service
    body = await read_body(request, ModelBody, service.options.max_body)
    shelved = service.find_shelved(body.model)
    card = shelved.card
    parameters = "" if shelved.context is None else f"num_ctx {shelved.context}"
    return {
        "modelfile": f"FROM {tag(shelved.name)}\n",
        "parameters": parameters,
        "template": card.chat_template or "",
        "details": _details(card),
        "model_info": {"general.parameter_count": card.parameters, **card.metadata},
        "capabilities": _capabilities(shelved),
        "modified_at": _time(card.changed or request.app.state.created),
    }


@router.post("/api/pull", response_model=None)
async def pull(request: Request) -> Response:
    """Report success for a model of the server; refuse any other, because none is downloaded."""
    service: Service = request.app.state.service
    body = await read_body(request, PullBody, service.options.max_body)
    service.find_shelved(body.model)
    if body.stream is False:
        return JSONResponse({"status": "success"})

    async def lines() -> AsyncGenerator[bytes, None]:
        for status in ("pulling manifest", "success"):
            yield as_line({"status": status})

    return StreamingResponse(lines(), media_type=LineStream.media_type)


def tag(name: str) -> str:
    """Return a model's name as Ollama lists it: with a tag."""
    return name if ":" in name else name + LATEST


def _listed(shelved: ShelvedModel, started: float) -> dict[str, Any]:
    card = shelved.card
    return {
        "name": tag(shelved.name),
        "model": tag(shelved.name),
        "modified_at": _time(card.changed or started),
        "size": card.size_bytes,
        "digest": _digest(card),
        "details": _details(card),
    }


def _running(shelved: ShelvedModel) -> dict[str, Any]:
    assert shelved.llm is not None
    used = shelved.llm.engine.stats().memory
    on_gpus = sum(memory.used_bytes for memory in used if memory.device != HOST)
    left_s = shelved.idle_left_s
    expires = datetime.now(UTC) + (STAYS if left_s == NEVER else timedelta(seconds=left_s))
    return {
        "name": tag(shelved.name),
        "model": tag(shelved.name),
        "size": sum(memory.used_bytes for memory in used),
        "digest": _digest(shelved.card),
        "details": _details(shelved.card),
        "expires_at": expires.isoformat().replace("+00:00", "Z"),
        "size_vram": on_gpus,
        "context_length": shelved.context,
        # Not in Ollama's API; `headroom ps` shows them.
        "memory": {memory.device: memory.used_bytes for memory in used},
        "idle_s": shelved.idle_for_s,
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


def _capabilities(shelved: ShelvedModel) -> list[str]:
    found = ["completion", "embedding"]
    template = shelved.card.chat_template
    if template is None and shelved.llm is not None:
        known = shelved.llm.template
        template = None if known is None else known.source
    if template:  # a template without tools gets them explained in the system message
        found.append("tools")
    if shelved.thinks:
        found.append("thinking")
    if shelved.llm is not None and shelved.llm.fill_in is not None:
        found.append("insert")
    return found


def _digest(card: ModelCard) -> str:
    return hashlib.sha256(f"{card.name} {card.digest}".encode()).hexdigest()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
