"""The HTTP application: its endpoints, its API key, its start and its stop."""

import contextlib
import hmac
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from headroom.errors import HeadroomError, OptionError
from headroom.llm import LLM
from headroom.options import Options
from headroom.server import (
    anthropic_messages,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    props,
    responses,
    tokens,
)
from headroom.server.anthropic_errors import error_response, speaks_anthropic
from headroom.server.anthropic_models import models_page, show_model_info
from headroom.server.codex import codex_model
from headroom.server.holding import HoldModels
from headroom.server.metrics import MeasureRequests, Metrics
from headroom.server.refusals import RefusalError, problem_for
from headroom.server.responses_store import ResponseStore
from headroom.server.service import Service
from headroom.server.shelf import Place, Shelf
from headroom.units import parse_size

log = logging.getLogger("headroom.server")

# A new endpoint is a module with a router, and a word here.
ENDPOINTS = (
    anthropic_messages,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_embeddings,
    props,
    responses,
    tokens,
)
STOP_S = 5  # seconds that a shutdown waits for clients to take their last events
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
        exception_handlers={
            HeadroomError: answer_error,
            HTTPException: answer_error,
            Exception: answer_error,
        },
    )
    app.state.service = Service(shelf, options, metrics)
    app.state.created = int(time.time())
    app.state.responses = ResponseStore(
        options.stored_responses, parse_size(options.stored_bytes, "stored_bytes")
    )
    for path in ("/", "/health"):  # agents ask for the root to see whether a server is there
        app.add_api_route(path, health, methods=["GET", "HEAD"])
    for endpoint in (status_routes, *(module.router for module in ENDPOINTS)):
        app.include_router(endpoint, dependencies=[Depends(check_key)])
    app.add_middleware(HoldModels)  # the innermost one
    if options.cors is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[options.cors],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(MeasureRequests, metrics=metrics)
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that raised an error, in the shape of the API that it belongs to."""
    problem = problem_for(request, error)
    if speaks_anthropic(request):
        return error_response(problem, error)
    if request.url.path.startswith("/api/"):  # Ollama's
        return JSONResponse({"error": problem.message}, problem.status, dict(problem.headers))
    return problem.response()


async def check_key(request: Request) -> None:
    """Refuse a request without the API key, if the server has one."""
    service: Service = request.app.state.service
    if service.options.api_key is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    sent = [key.strip()] if scheme.lower() == "bearer" else []
    if "x-api-key" in request.headers:  # as Anthropic's clients send it
        sent.append(request.headers["x-api-key"].strip())
    right = service.options.api_key.encode()
    # The bytes of a header as they came.
    if not any(hmac.compare_digest(key.encode("latin-1"), right) for key in sent):
        what = "The API key is wrong." if any(sent) else "An API key is needed."
        hint = "Send `Authorization: Bearer KEY` or `x-api-key: KEY`."
        raise RefusalError(401, "invalid_api_key", what, hint=hint)


async def health(request: Request) -> Response:
    """Answer 200 while requests are taken."""
    service: Service = request.app.state.service
    if service.stopping:
        return JSONResponse({"status": "stopping"}, status_code=503)
    if not all(engine.alive for engine in service.shelf.engines().values()):
        return JSONResponse({"status": "engine stopped"}, status_code=503)
    return JSONResponse({"status": "ok"})


@status_routes.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """List all models, loaded or not; Codex, which gives its version, has its own schema."""
    service: Service = request.app.state.service
    if "client_version" in request.query_params:
        shown = [
            codex_model(place.name, place.context, thinks=place.thinks)
            for place in service.shelf.places
            if place.context is not None
        ]
        return {"models": shown}
    models = [_model(request, place) for place in service.shelf.places]
    return models_page(models) if speaks_anthropic(request) else {"object": "list", "data": models}


@status_routes.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Show one model; it is not loaded for that."""
    service: Service = request.app.state.service
    model = _model(request, service.place(name, exact=True))
    return show_model_info(model) if speaks_anthropic(request) else model


@status_routes.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=METRICS_TYPE)


def _model(request: Request, place: Place) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": place.name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "headroom",
        "context_length": place.context,
        "size_bytes": place.card.size_bytes,
        "loaded": place.llm is not None,
    }
    if place.card.error is not None:
        shown["error"] = str(place.card.error)
    return shown


class HttpServer(uvicorn.Server):
    """A uvicorn server that logs when it is ready and ends running answers before it stops."""

    def __init__(self, models: Shelf | LLM, options: Options, bound: socket.socket) -> None:
        self._app = create_app(models, options)
        self._socket = bound
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.address = f"http://{host}:{bound.getsockname()[1]}"
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            ws="none",  # clients that try WebSockets get a plain refusal, and go on without
            timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop."""
        super().run(sockets or [self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then log the address."""
        await super().startup(sockets)
        if self.started:
            service: Service = self._app.state.service
            service.shelf.start_timers()
            log.info("serve: ready on %s", self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End running answers first, since uvicorn would wait for them."""
        log.info("serve: stopping")
        service: Service = self._app.state.service
        service.stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; uvicorn's own version raises the signal again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_server(models: Shelf | LLM, options: Options, bound: socket.socket) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM."""
    HttpServer(models, options, bound).run()


def bind(host: str, port: int) -> socket.socket:
    """Bind an address; connections are refused until the server listens."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        # The system's own words, without the address that Python adds to them.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise OptionError(
            f"Cannot listen on {host}:{port}: {reason}.",
            hint="Choose another --port or --host.",
            param="port",
        ) from error
    return bound
