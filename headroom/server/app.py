"""The HTTP application: its endpoints, its API key, and what it says about itself."""

import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headroom.errors import HeadroomError
from headroom.llm import LLM
from headroom.options import Options
from headroom.server import (
    anthropic_messages,
    chat_page,
    experts,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    plan,
    prefixes,
    props,
    responses,
    tokens,
)
from headroom.server.anthropic_errors import error_response, speaks_anthropic
from headroom.server.anthropic_models import models_page, show_model_info
from headroom.server.browsers import GuardAgainstPages, allowed_origins, listed
from headroom.server.codex import codex_model
from headroom.server.holding import HoldModels
from headroom.server.json_values import JSONResponse
from headroom.server.keys import KeyRing
from headroom.server.metrics import Metrics
from headroom.server.refusals import problem_for
from headroom.server.request_log import ID_HEADER, WatchRequests, current_record
from headroom.server.responses_store import ResponseStore
from headroom.server.service import Service
from headroom.server.shelf import Shelf, ShelvedModel
from headroom.units import parse_size

# A new endpoint is a module with a `router`, listed here.
ENDPOINTS = (
    anthropic_messages,
    experts,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    plan,
    prefixes,
    props,
    responses,
    tokens,
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

status_routes = APIRouter()


def create_app(models: Shelf | LLM, options: Options) -> FastAPI:
    """Return the HTTP application of a shelf of models, or of one loaded model."""
    shelf = models if isinstance(models, Shelf) else Shelf.of_loaded(models, options)
    metrics = Metrics(shelf.engines, by_model=shelf.several)
    app = FastAPI(
        title="headroom",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        default_response_class=JSONResponse,
        exception_handlers={
            HeadroomError: answer_error,
            HTTPException: answer_error,
            Exception: answer_error,
        },
    )
    app.state.service = Service(shelf, options, metrics)
    app.state.keys = KeyRing(options)
    app.state.created = int(time.time())
    app.state.responses = ResponseStore(
        options.stored_responses, parse_size(options.stored_bytes, "stored_bytes")
    )
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.include_router(chat_page.router)
    routers = [status_routes, *(module.router for module in ENDPOINTS)]
    for router in routers:
        app.include_router(router, dependencies=[Depends(check_key)])
    # The method and path of each, from which errors suggest one for a path that is not there.
    app.state.endpoints = [
        (method, route.path)
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    ]
    app.add_middleware(HoldModels)  # added first, so it runs innermost
    if (origins := allowed_origins(options.cors)) is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=listed(options.cors),
            allow_origin_regex=origins.pattern,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[ID_HEADER, "retry-after"],
        )
    app.add_middleware(GuardAgainstPages, options=options, answer_error=answer_error)
    app.add_middleware(WatchRequests, metrics=metrics)
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that raised an error, in the format of the API that was called."""
    problem = problem_for(request, error)
    if speaks_anthropic(request):
        return error_response(problem, error)
    if request.url.path.startswith("/api/"):  # Ollama's
        return JSONResponse({"error": problem.message}, problem.status, dict(problem.headers))
    return problem.response()


async def check_key(request: Request) -> None:
    """Refuse a request without a right key, or beyond the key's limits."""
    keys: KeyRing = request.app.state.keys
    if (key := keys.find(request)) is not None:
        current_record().key = key
        key.take_request()


async def health(request: Request) -> Response:
    """Answer 200 while the server accepts requests, else 503."""
    service: Service = request.app.state.service
    if service.stopping:
        return JSONResponse({"status": "stopping"}, status_code=503)
    if (loading := service.shelf.first_load) is not None:
        shown = {"status": "loading", "progress": round(loading.share, 3)}
        return JSONResponse(shown, status_code=503, headers={"Retry-After": "1"})
    engines = service.shelf.engines().values()
    trouble = [engine.trouble for engine in engines if engine.trouble]
    if not all(engine.alive for engine in engines):
        reason = {"reason": trouble[0]} if trouble else {}
        return JSONResponse({"status": "engine stopped", **reason}, status_code=503)
    if trouble:
        shown = {"status": "restarting workers", "reason": trouble[0]}
        return JSONResponse(shown, status_code=503, headers={"Retry-After": "1"})
    return JSONResponse({"status": "ok"})


@status_routes.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List all models, loaded or not, as OpenAI or Anthropic do, or in Codex's own schema.

    Codex is recognised by the query parameter `client_version`.
    """
    service: Service = request.app.state.service
    if "client_version" in request.query_params:
        shown = [
            codex_model(shelved.name, shelved.context, thinks=shelved.thinks)
            for shelved in service.shelf.models
            if shelved.context is not None
        ]
        return {"models": shown}
    models = [_model(request, shelved) for shelved in service.shelf.models]
    return models_page(models) if speaks_anthropic(request) else {"object": "list", "data": models}


@status_routes.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Show one model, without loading it."""
    service: Service = request.app.state.service
    model = _model(request, service.find_shelved(name, exact=True))
    return show_model_info(model) if speaks_anthropic(request) else model


@status_routes.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=METRICS_TYPE)


def _model(request: Request, shelved: ShelvedModel) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": shelved.name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "headroom",
        "context_length": shelved.context,
        "size_bytes": shelved.card.size_bytes,
        "loaded": shelved.llm is not None,
    }
    shelf = request.app.state.service.shelf
    if shelf.first_load is not None and shelved is shelf.models[0]:
        shown["loading"] = round(shelf.first_load.share, 3)
    if (wrong := shelved.card.error or shelved.card.unfit) is not None:
        shown["error"] = str(wrong)
    return shown
