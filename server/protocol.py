"""HTTP as uvicorn speaks it, with bounds for the head of a request: uvicorn sets none to its size
nor to its time. What bounds the body is in the middleware.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = 64 * 1024  # bytes of the first line and the headers; a read more may be taken in
SECONDS = 30.0  # from the connection, or the first byte of a later request, to the last header


class Protocol(HttpToolsProtocol):
    _size = 0
    _timer: asyncio.TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            if self._size > HEAD:
                self.send_400_response("The head of the request is too large.")
                return
            self._size += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._has_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._size = 0
        self._timer = self.loop.call_later(SECONDS, self.transport.close)

    def _has_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
