"""An HTTP/1.1 connection whose answers are read where they arrive.

A client for every purpose takes each chunk through a dozen layers. On a machine whose caches the
model has emptied meanwhile that is a millisecond per token, which the server beside it loses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self, cast
from urllib.parse import urlsplit

from httptools import HttpResponseParser


class Unanswered(ConnectionError):
    """The connection was closed before an answer began: if it lay idle, before the request came."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a path of a server is, and how it is asked for."""

    host: str
    port: int
    tls: bool
    head: bytes  # of every request

    @classmethod
    def of(cls, url: str, path: str, api_key: str | None) -> Self:
        parts = urlsplit(url)
        host, tls = parts.hostname or "", parts.scheme == "https"
        place = parts.netloc.rpartition("@")[2]
        lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {place}"]
        lines += [f"Authorization: Bearer {api_key}"] if api_key else []
        lines += ["Content-Type: application/json", "Content-Length: "]
        return cls(host, parts.port or (443 if tls else 80), tls, "\r\n".join(lines).encode())

    def request(self, body: bytes) -> bytes:
        return b"%b%d\r\n\r\n%b" % (self.head, len(body), body)


class Connection(asyncio.Protocol):
    """Answers one request after another."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._end: asyncio.Future[None] | None = None
        self._open = False
        self._status = 0

    @classmethod
    async def to(cls, address: Address) -> Self:
        """Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(
            cls, address.host, address.port, ssl=address.tls or None
        )
        return connection

    async def ask(
        self, request: bytes, receive: Callable[[bytes], None], silence: float
    ) -> tuple[int, bytes]:
        """Send it, and hand on the body's parts as they come; returns the status, and the body if
        that is not 200. `silence` is the longest in seconds. Raises OSError, HttpParserError,
        and what `receive` raises.
        """
        if not self._open:
            raise Unanswered
        self._parser, self._receive = HttpResponseParser(self), receive
        self._status, self._body = 0, bytearray()
        self._complete = self._reusable = False
        self._end, self._heard = self._loop.create_future(), self._loop.time()
        self._transport.write(request)
        try:
            while not self._end.done():
                left = self._heard + silence - self._loop.time()
                if left <= 0:
                    raise TimeoutError(f"the server was silent for {silence:g} seconds")
                await asyncio.wait((self._end,), timeout=left)
            self._end.result()
        finally:
            if not self._reusable:
                self.close()
        return self._status, bytes(self._body)

    def close(self) -> None:
        """At once, whatever is on its way."""
        self._open = False
        if self._end:
            self._end.cancel()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._open = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if not self._status:
            error = Unanswered(error or "the server closed the connection")
        self._finish(error)  # without an error: what has no length ends with the connection

    def data_received(self, data: bytes) -> None:
        if self._end is None or self._end.done():  # nobody asked
            self.close()
            return
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
            if self._status == HTTPStatus.OK and self._body:
                self._receive(bytes(self._body))
                self._body.clear()
        except Exception as error:  # it is for whoever asked
            self._reusable = False
            self._finish(error)
        else:
            if self._complete:
                self._finish(None)

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete = True
        self._reusable = self._parser.should_keep_alive()  # which it does not know later

    def _finish(self, error: Exception | None) -> None:
        if self._end is None or self._end.done():
            return
        if error:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)
