"""A server of a few lines, whose timing and faults are chosen."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

DONE = "[DONE]"
Script = list[str | float]  # events, and pauses in seconds between them
RESET = b""  # in place of an event: ends the connection; other bytes are sent as they are


def event(tokens: int, cached: int = 0, prompt: int = 4, **more: object) -> str:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return json.dumps({"choices": [{"text": "x"}], "usage": usage, **more})


def answer(body: dict[str, Any], first: float = 0.0, pause: float = 0.0) -> Script:
    """What a server without faults says: every token an event of its own, with its id."""
    script: Script = [first]
    for n in range(1, body["max_tokens"] + 1):
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
        choice = {"text": "x", "token_ids": [200 + n]}
        script += [json.dumps({"choices": [choice], "usage": usage}), pause]
    return [*script, DONE]


class FakeServer:
    """Answers every completion with what `script` makes of its body."""

    def __init__(self) -> None:
        self.script: Callable[[dict[str, Any]], Sequence[str | bytes | float]] = answer
        self.status = 200
        self.interim = b""  # answers before that one
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.closes = False  # each connection after one answer
        self.at_once = self.most_at_once = 0
        self.pages: dict[str, object] = {
            "/v1/models": {"data": [{"id": "fake", "max_model_len": 512}]}
        }
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                method, path, _ = head.split(" ", 2)
                if method == "GET":
                    await self.page(writer, path)
                else:
                    size = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                    self.heads.append(head)
                    self.bodies.append(json.loads(await reader.readexactly(size)))
                    self.at_once += 1
                    self.most_at_once = max(self.at_once, self.most_at_once)
                    try:
                        await self.complete(writer, self.bodies[-1])
                    finally:
                        self.at_once -= 1
                    if self.closes:
                        return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has left, or the test is over
        finally:
            writer.close()

    async def page(self, writer: asyncio.StreamWriter, path: str) -> None:
        page = self.pages.get(path)
        body = json.dumps(page).encode()
        status = "200 OK" if page is not None else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(self.interim)
        writer.write(f"HTTP/1.1 {self.status} -\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for part in self.script(body):
            if isinstance(part, float):
                await writer.drain()
                if part:
                    await asyncio.sleep(part)
            elif part == RESET:
                at_once = struct.pack("ii", 1, 0)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                writer.transport.abort()
                return
            else:
                data = part if isinstance(part, bytes) else f"data: {part}\n\n".encode()
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[FakeServer]:
    """It runs in a thread, on a free port."""
    fake, started = FakeServer(), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(fake.talk, "127.0.0.1", 0, backlog=512, ssl=tls)
        fake.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as server:
        yield server
