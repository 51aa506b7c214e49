"""Server-sent events: their form, and a response that always ends what it began."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"
COMMENT = ": still here\n\n"

# ASCII only: some clients split a stream at U+0085 or U+2028, which JSON may leave as they are.
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
quoted = json.encoder.encode_basestring_ascii  # what it makes of a string


def event(data: object) -> str:
    return f"data: {encode(data)}\n\n"


class EventStream(StreamingResponse):
    """A stream of events. `close` is called when it is over, however that comes about.

    The generator's own `finally` would not do: it does not run where the client left before the
    first event, nor while a stalled reader holds the send.
    """

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
