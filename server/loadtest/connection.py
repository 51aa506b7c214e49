"""An HTTP/1.1 connection whose answers are read where they arrive.

A client for every purpose takes each chunk through a dozen layers. On a machine whose caches the
model has emptied meanwhile that is a millisecond per token, which the server beside it loses.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self, cast
from urllib.parse import urlsplit

from httptools import HttpParserUpgrade, HttpResponseParser

AT_ONCE = 0.05  # seconds in which what belongs together comes


class Unanswered(ConnectionError):
    """The connection was closed before the request was sent, or at once when it was: nobody can
    have worked on it.
    """


@dataclass(frozen=True, slots=True)
class Address:
    """Where a path of a server is, and how it is asked for."""

    host: str
    port: int
    tls: ssl.SSLContext | None  # one for all connections: to make it takes long
    head: bytes  # of every request

    @classmethod
    def of(cls, url: str, path: str, api_key: str | None) -> Self:
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        place = parts.netloc.rpartition("@")[2]
        lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {place}"]
        lines += [f"Authorization: Bearer {api_key}"] if api_key else []
        lines += ["Content-Type: application/json", "Content-Length: "]
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, "\r\n".join(lines).encode())

    def request(self, body: bytes) -> bytes:
        return b"%b%d\r\n\r\n%b" % (self.head, len(body), body)


class Connection(asyncio.Protocol):
    """Answers one request after another."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._open = False
        self._complete = True  # nothing is asked

    @classmethod
    async def to(cls, address: Address) -> Self:
        """Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(
            cls, address.host, address.port, ssl=address.tls
        )
        return connection

    async def ask(
        self, request: bytes, receive: Callable[[bytes], bool], silence: float
    ) -> tuple[int, bytes]:
        """Send it, and hand on the body's parts as they come, until `receive` says that it has all;
        returns the status, and the body if that is not 200. `silence` is the longest in seconds.
        Raises OSError, HttpParserError, and what `receive` raises.
        """
        if not self._open:
            raise Unanswered("the connection is closed")
        self._parser, self._receive = HttpResponseParser(self), receive
        self._status, self._body = 0, bytearray()
        self._complete = self._answered = self._reusable = False
        self._end = self._loop.create_future()
        self._sent = self._heard = self._loop.time()
        self._transport.write(request)
        keep = False
        try:
            while not self._end.done():
                left = self._heard + silence - self._loop.time()
                if left <= 0:
                    raise TimeoutError(f"the server was silent for {silence:g} seconds")
                await asyncio.wait((self._end,), timeout=left)
            self._end.result()
            if self._open and not self._complete:  # the body's end, without which it cannot be kept
                self._end = self._loop.create_future()
                with suppress(Exception):
                    await asyncio.wait_for(self._end, AT_ONCE)
            keep = self._reusable
        finally:
            if not keep:
                self.close()
        return self._status, bytes(self._body)

    def close(self) -> None:
        """At once, whatever is on its way."""
        self._open = False
        self._end.cancel()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._open = cast(asyncio.Transport, transport), True

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if self._complete:
            return
        if not self._answered and self._loop.time() - self._sent < AT_ONCE:
            error = Unanswered(error or "the server closed the connection at once")
        elif not self._status:
            error = error or ConnectionError("the server closed the connection without an answer")
        self._finish(error)  # without an error: what has no length ends with the connection

    def data_received(self, data: bytes) -> None:
        if self._complete:  # nobody asked
            self.close()
            return
        self._answered, self._heard, enough = True, self._loop.time(), False
        try:
            self._parser.feed_data(data)
            if self._status == HTTPStatus.OK and self._body:
                enough = self._receive(bytes(self._body))
                self._body.clear()
        except HttpParserUpgrade:
            self._finish(ConnectionError("the server changed to another protocol"))
        except Exception as error:  # it is for whoever asked
            self._finish(error)
        else:
            if self._complete or enough:
                self._finish(None)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= HTTPStatus.OK:  # below it, another one follows
            self._status = status

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._status:
            self._complete = True
            self._reusable = self._parser.should_keep_alive()  # which it does not know later

    def _finish(self, error: Exception | None) -> None:
        if self._end.done():
            return
        if error:
            self._end.set_exception(error)
        else:
            self._end.set_result(None)
