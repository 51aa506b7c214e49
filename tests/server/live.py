"""An application around a fake model, behind a real socket where a test is about sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import httpx2
import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.engine.snapshot import Snapshot
from server.engine.worker import Worker
from server.protocol import Protocol
from server.settings import Settings
from tests.fakes import FakeModel, loads

SMALL = {"max_running": 8, "step_tokens": 64, "max_queue": 64}


def app_of(model: FakeModel, **settings: object) -> FastAPI:
    given = {**SMALL, **settings}
    rows = given.pop("rows", 4096)
    assert isinstance(rows, int)
    return create_app(Settings.load(**given), loads(model, rows=rows))


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.002)


class Live:
    """uvicorn in a thread, on a free port."""

    def __init__(self, model: FakeModel, **settings: object) -> None:
        self.model = model
        self.app = app_of(model, **settings)
        self.worker: Worker = self.app.state.service.worker
        config = uvicorn.Config(
            self.app,
            http=Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self) -> Self:
        self.thread.start()
        wait_until(lambda: self.worker.state != "loading")
        self.client = httpx2.Client(base_url=self.url, trust_env=False, timeout=60)
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.model.may_run.set()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    @property
    def snapshot(self) -> Snapshot:
        return self.worker.snapshot

    def complete(self, **body: object) -> httpx2.Response:
        return self.client.post("/v1/completions", json=body)

    def send(self, **body: object) -> socket.socket:
        """Send a completions request by hand and leave the answer to the caller."""
        return self.send_raw(json.dumps(body).encode())

    def send_raw(
        self, body: bytes, headers: Mapping[str, str] = {}, path: str = "/v1/completions"
    ) -> socket.socket:
        lines = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
        head = "".join(f"{k}: {v}\r\n" for k, v in {**lines, **headers}.items() if v)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return connection

    def outcomes(self) -> dict[str, int]:
        """The outcomes counted so far, without those that never happened."""
        return outcomes(self.client.get("/metrics").text)


def outcomes(exposition: str) -> dict[str, int]:
    counts = {}
    for line in exposition.splitlines():
        if line.startswith("onerow_requests_total{"):
            name, _, value = line.partition('outcome="')[2].partition('"} ')
            if float(value):
                counts[name] = int(float(value))
    return counts


def events(stream: str) -> list[Any]:
    """The events of a stream, [DONE] as a string; the framing is checked on the way."""
    assert "\r" not in stream
    parts = stream.split("\n\n")
    assert parts.pop() == "", "the stream ends in the middle of an event"
    found = []
    for part in parts:
        if part.startswith(":"):
            continue
        assert part.startswith("data: "), part
        assert "\n" not in part
        data = part.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
