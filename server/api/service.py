"""What the routes share: the settings, the worker, the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from server.api.errors import ApiError, try_later
from server.engine.worker import Served, State, Worker
from server.metrics import Metrics
from server.settings import Settings


@dataclass(frozen=True)
class Service:
    settings: Settings
    worker: Worker
    metrics: Metrics
    started: int  # Unix seconds

    @classmethod
    def of(cls, request: Request) -> Service:
        service: Service = request.app.state.service
        return service

    @property
    def served(self) -> Served:
        if self.worker.served is None:
            raise unavailable(self.worker.state)
        return self.worker.served


def unavailable(state: State) -> ApiError:
    message = {
        State.LOADING: "The server is loading its model.",
        State.DRAINING: "The server is shutting down.",
    }.get(state, "The engine has failed.")
    return try_later(503, message, state.value)
