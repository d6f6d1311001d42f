"""HttpServer: listens, loads the first model, serves, and stops without losing answers."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import uvicorn

from headroom.errors import DeviceError, OptionError
from headroom.llm import LLM
from headroom.options import Options
from headroom.progress import LoadProgress, ignore_progress
from headroom.server.app import create_app
from headroom.server.connections import (
    KEEP_ALIVE_S,
    AcceptErrors,
    HttpConnection,
    TlsListener,
    connection_limit,
    end_late,
)
from headroom.server.service import Service
from headroom.server.shelf import Shelf

log = logging.getLogger("headroom.server")

BACKLOG = 128  # connections that the system holds until the server accepts them
HEAD_BYTES = 64 << 10  # most bytes of a request's first line and headers
STOP_S = 5.0  # seconds for clients to read their last events
ABORT_S = 1.0  # seconds for requests to end after their connections were aborted
TICK_S = 0.05  # seconds between looks at whether all requests have ended

ShowLoading = Callable[[], contextlib.AbstractContextManager[LoadProgress]]


@contextlib.contextmanager
def show_nothing() -> Iterator[LoadProgress]:
    """Show no progress."""
    yield ignore_progress


class HttpServer(uvicorn.Server):
    """A uvicorn server of a shelf of models, or of one loaded model.

    It listens before it loads the first model, so that /health can report the progress.
    """

    def __init__(
        self,
        models: Shelf | LLM,
        options: Options,
        bound: socket.socket,
        show_loading: ShowLoading = show_nothing,
    ) -> None:
        self._app = create_app(models, options)
        self._socket = bound
        self._show_loading = show_loading
        self._drain_s = options.drain
        self._loading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # what ended the server, if not a signal
        host = f"[{options.host}]" if ":" in options.host else options.host
        check_tls(options)
        scheme = "http" if options.tls_cert is None else "https"
        self.address = f"{scheme}://{host}:{bound.getsockname()[1]}"
        self._limit = connection_limit(options.max_connections)
        self._protocol = functools.partial(HttpConnection, limit=self._limit)
        config = uvicorn.Config(
            self._app,
            http=cast(type[asyncio.Protocol], self._protocol),
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            ws="none",  # clients that try WebSockets are refused, and then use plain HTTP
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        super().__init__(config)

    @property
    def service(self) -> Service:
        """The service that all endpoints share."""
        service: Service = self._app.state.service
        return service

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal; raise an error if a model is not loaded or its workers are lost."""
        super().run(sockets or [self._socket])
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then begin to load the first model."""
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        context = self.config.ssl
        await super().startup(sockets if context is None else [])
        if context is not None:
            listeners = [self._tls_listener(bound, context) for bound in sockets or ()]
            self.servers = cast(list[asyncio.Server], listeners)  # they are closed in the same way
        if self.started:
            self._loading = asyncio.create_task(self._load_first())

    def _tls_listener(self, bound: socket.socket, context: ssl.SSLContext) -> TlsListener:
        state = self.server_state
        new = functools.partial(self._protocol, self.config, state, self.lifespan.state)
        return TlsListener(bound, context, new, state.connections, self._limit)

    async def _load_first(self) -> None:
        shelf = self.service.shelf
        if shelf.first_load is not None:
            log.info("serve: listening on %s, loading %s", self.address, shelf.models[0].name)
            try:
                with self._show_loading() as show:
                    await asyncio.to_thread(shelf.load_first, show)
            except Exception as error:
                if not self.should_exit:  # a stop ends the load with an error, too
                    self._failure = error
                self.should_exit = True
                return
        shelf.start_timers()
        log.info("serve: ready on %s", self.address)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, close connections of slow clients, and look for workers lost for good."""
        if counter % 10 == 0:
            end_late(self.server_state.connections, time.monotonic())
            self._check_workers()
        return await super().on_tick(counter)

    def _check_workers(self) -> None:
        """Stop the server if a model's workers are lost and will not be started again."""
        for engine in self.service.shelf.engines().values():
            if not engine.alive and engine.trouble and not self.should_exit:
                self._failure = DeviceError(engine.trouble, hint="See --on-worker-loss.")
                self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, wait for the running ones, then end those that are left."""
        service, tasks = self.service, self.server_state.tasks
        service.refuse_requests()
        for server in self.servers:
            server.close()
        if tasks and not self.force_exit:
            log.info(
                "serve: stopping; %d requests have %.0f s to end; a second signal ends them now",
                len(tasks),
                self._drain_s,
            )
        else:
            log.info("serve: stopping")
        await self._wait(self._drain_s)
        service.stop()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._wait(STOP_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = False  # without connections the remaining requests end quickly
        await self._wait(ABORT_S)
        self.force_exit = True  # uvicorn has nothing to wait for
        await super().shutdown(sockets)
        if self._loading is not None:
            await self._loading

    async def _wait(self, most_s: float) -> None:
        """Wait until no request runs; a second signal ends the wait."""
        deadline = time.monotonic() + most_s
        while self.server_state.tasks and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal; end running requests at once at the second."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; uvicorn's own method would raise the signal again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before: dict[int, Any] = {n: signal.signal(n, self.handle_exit) for n in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_server(
    models: Shelf | LLM,
    options: Options,
    bound: socket.socket,
    show_loading: ShowLoading = show_nothing,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM."""
    HttpServer(models, options, bound, show_loading).run()


def check_tls(options: Options) -> None:
    """Raise OptionError if certificate and key cannot be used together."""
    if options.tls_cert is None and options.tls_key is None:
        return
    if options.tls_cert is None or options.tls_key is None:
        raise OptionError(
            "HTTPS needs a certificate and its key, but only one was given.",
            hint="Give both --tls-cert and --tls-key.",
            param="tls_key" if options.tls_cert is not None else "tls_cert",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        raise OptionError(
            f"The certificate {options.tls_cert} and the key {options.tls_key} cannot be used: "
            f"{error.strerror or error}.",
            hint="Both must be PEM files, and the key without a password.",
            param="tls_cert",
        ) from error


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; clients wait until the server accepts them."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        if bound is not None:
            bound.close()
        # strerror() gives the system's reason without the address that Python adds to it.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise OptionError(
            f"Cannot listen on {host}:{port}: {reason}.",
            hint="Choose another --port or --host.",
            param="port",
        ) from error
    return bound
