"""The application, and the process that serves it: from the bound socket to the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware

from server.api import (
    aside,
    cache,
    completions,
    docs,
    errors,
    inspect,
    models,
    openapi,
    operations,
    page,
    sessions,
    tokens,
)
from server.api.keys import KeyFileError, Keys
from server.api.lines import Lines
from server.api.middleware import BodyLimit, Exchange, Key, Readiness
from server.api.register import Register
from server.api.service import Service, answer_unavailable
from server.engine.worker import Engine, State, Unavailable, Worker
from server.logs import set_up
from server.metrics import Metrics
from server.protocol import Protocol
from server.settings import Settings, unknown_variables
from server.version import VERSION

log = logging.getLogger("onerow")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FLUSH = 1  # seconds for answers to leave after the last call has ended
SAVE = 60  # seconds for the rows of sessions to be written
# Seconds that a thread which wants the interpreter leaves it to another. After each step the engine
# wants it from the event loop, which may have the events of 64 streams to send: Python's own 5 ms
# would be longer than a step.
SWITCH = 0.0005
IDLE = 75  # seconds that a connection may wait for its next request; longer than clients keep it

LoadEngine = Callable[[Settings], Engine]


class App(FastAPI):
    """FastAPI, with an OpenAPI document that is true."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = openapi.complete(super().openapi())
        return self.openapi_schema


def create_app(settings: Settings, load_engine: LoadEngine) -> FastAPI:
    """The application. The engine is loaded, in its own thread, when the application starts.
    Raises KeyFileError.
    """
    worker = Worker(partial(load_engine, settings), settings.max_open)
    metrics = Metrics(worker)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        aside.prepare()
        worker.start()
        yield
        await asyncio.to_thread(worker.stop, FLUSH)

    keys = Keys(settings)
    app = App(
        title="onerow",
        version=VERSION,
        description="GPT completions. Each new token computes only its own row.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from outside hosts
        redoc_url=None,
        middleware=[
            Middleware(Exchange, count=metrics.count),
            Middleware(Key, keys=keys),
            Middleware(Readiness, worker=worker),
            Middleware(BodyLimit, size=settings.max_body, seconds=settings.body_timeout),
        ],
    )
    app.state.service = Service(
        settings,
        worker,
        metrics,
        keys,
        started=int(time.time()),
        lines=Lines(settings.max_queue),
        register=Register(worker),
    )
    errors.install(app)
    app.add_exception_handler(Unavailable, answer_unavailable)
    for routes in (docs, completions, models, tokens, sessions, cache, inspect, operations, page):
        app.include_router(routes.router)
    return app


def settled(load_engine: LoadEngine, settings: Settings) -> Engine:
    """The engine. What is there by then stays, and the garbage collector need not look at it again:
    that would stop everybody for a tenth of a second, now and then.
    """
    engine = load_engine(settings)
    gc.collect()
    gc.freeze()
    return engine


class Server(uvicorn.Server):
    """uvicorn with our own way to end.

    The first signal closes the door and lets running requests end, for as long as the grace time;
    the second one ends the process at once. A failed engine ends the server, too.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.worker, self.keys, self.grace = service.worker, service.keys, grace
        self.exit_code = 0
        self._deadline: float | None = None  # on the clock of time.monotonic

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if self.keys.file is not None:
            loop.add_signal_handler(signal.SIGHUP, self.keys.reload)
        yield
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            host, port = bound.getsockname()[:2]
            log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def _on_signal(self, number: int) -> None:
        if self._deadline is not None:
            os._exit(128 + number)
        log.info("shutting down: %d completions have %g seconds", self.worker.open, self.grace)
        self._deadline = time.monotonic() + self.grace
        self.worker.drain()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; true ends the server."""
        if self.worker.state is State.FAILED:
            self.exit_code = 1
            self.should_exit = True
        elif self._deadline is not None:
            late = time.monotonic() > self._deadline
            if late:
                self.worker.end_all(completions.SHUTDOWN, "The server is shutting down.")
            self.should_exit = late or self.worker.idle
        return await super().on_tick(counter)


def serve(settings: Settings, load_engine: LoadEngine) -> int:
    """Serve until a signal or a failure; returns the exit code. Binds before it loads."""
    set_up(settings.log_level, settings.log_format)
    sys.setswitchinterval(SWITCH)
    for name in unknown_variables():
        log.warning("%s is no setting", name)
    try:
        app = create_app(settings, partial(settled, load_engine))
        bound = bind(settings.host, settings.port)
    except KeyFileError as error:
        log.critical("cannot start: api_key_file: %s", error)
        return 1
    except OSError as error:
        log.critical("cannot listen on %s:%d: %s", settings.host, settings.port, error.strerror)
        return 1
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        workers=1,  # sessions and rows live in this process
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=FLUSH,
    )
    server = Server(config, service, settings.grace)
    server.run(sockets=[bound])
    # In a long step, or still loading: nothing would end it politely.
    if not service.worker.stop(SAVE if settings.state_dir else FLUSH):
        logging.shutdown()
        os._exit(server.exit_code)
    return server.exit_code


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
