"""Fixtures for whoever talks HTTP to the server, and one thread for everyone's arithmetic."""

from __future__ import annotations

import os

# Before torch is imported, and for the processes that tests start. Tiny models gain nothing from
# threads, and on a busy machine two that wait for each other take a hundred times as long.
os.environ["OMP_NUM_THREADS"] = "1"

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from starlette.testclient import TestClient

from server.settings import Settings
from tests.fakes import FakeModel
from tests.server.live import Live, app_of, wait_until

# Whoever starts the tests in the background may have them ignore Ctrl-C, also in the processes
# that they start; some send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

Serve = Callable[..., TestClient]
ServeLive = Callable[..., Live]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"ONEROW_{name.upper()}", raising=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts an application around a fake model, and waits until it is ready."""
    with ExitStack() as stack:

        def start(
            model: FakeModel | None = None, *, wait: bool = True, **settings: object
        ) -> TestClient:
            app = app_of(model or FakeModel(), **settings)
            client = stack.enter_context(TestClient(app))
            if wait:
                wait_until(lambda: app.state.service.worker.state != "loading")
            return client

        yield start


@pytest.fixture
def client(serve: Serve) -> TestClient:
    return serve()


@pytest.fixture
def serve_live() -> Iterator[ServeLive]:
    """The same behind a real uvicorn and a socket."""
    with ExitStack() as stack:

        def start(model: FakeModel | None = None, **settings: object) -> Live:
            return stack.enter_context(Live(model or FakeModel(), **settings))

        yield start
