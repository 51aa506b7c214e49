"""What the routes share: the settings, the worker, the metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request, Response

from server.api.errors import ApiError, try_later
from server.api.keys import Keys
from server.api.lines import Lines
from server.api.register import Register
from server.engine.snapshot import SessionKey
from server.engine.worker import Served, State, Worker
from server.metrics import Metrics
from server.settings import Settings

MAX_LISTENERS = 16  # of /v1/cache/events


@dataclass(frozen=True)
class Service:
    settings: Settings
    worker: Worker
    metrics: Metrics
    keys: Keys
    started: int  # Unix seconds
    lines: Lines
    register: Register
    listeners: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LISTENERS))
    inspecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: dict[SessionKey, str] = field(default_factory=dict)  # the call whose turn it is

    @classmethod
    def of(cls, request: Request) -> Service:
        service: Service = request.app.state.service
        return service

    @property
    def keyed(self) -> bool:
        """Whether callers are told apart. Each then sees its own sessions and rows, and of all
        others the total alone.
        """
        return self.keys.file is not None

    @property
    def served(self) -> Served:
        if self.worker.served is None:
            raise unavailable(self.worker.state)
        return self.worker.served


async def answer_unavailable(request: Request, error: Exception) -> Response:
    """What the routes answer whose question the engine will not answer any more."""
    return unavailable(Service.of(request).worker.state).response


def unavailable(state: State) -> ApiError:
    message = {
        State.LOADING: "The server is loading its model.",
        State.DRAINING: "The server is shutting down.",
    }.get(state, "The engine has failed.")
    return try_later(503, message, state.value)
