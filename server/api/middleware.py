"""What every request passes on its way in, outermost first: identity, key, readiness, size.

Plain ASGI: Starlette's function style would hide from the routes that a client has left.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api import docs
from server.api.answers import milliseconds
from server.api.errors import ApiError, shorten
from server.api.keys import OPERATOR, Keys
from server.api.page import FILES
from server.api.service import unavailable
from server.engine.worker import State, Worker
from server.logs import Facts

log = logging.getLogger("onerow")

# Answer whatever the state is, and are logged at the debug level only.
PROBES = frozenset({"/health", "/ready", "/version", "/metrics"})
DOCUMENTS = frozenset({"/openapi.json", *docs.FILES})  # nothing of this server is in them
PAGE = frozenset(FILES)  # nor in these; the page says itself that the model is loading
OPEN = (PROBES - {"/metrics"}) | DOCUMENTS | PAGE  # need no key
COMPLETIONS = "/v1/completions"


class Exchange:
    """Gives a request its id, and says how it ended: a log line, and an outcome to count."""

    def __init__(self, app: ASGIApp, count: Callable[[str], None]) -> None:
        self.app, self.count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = Request(scope).state
        state.arrived = time.perf_counter()
        state.id = _request_id(Headers(scope=scope))
        state.tenant = OPERATOR
        state.warning = None
        state.outcome = None  # the completions route sets it when it has counted
        state.facts = {}  # for the log: numbers, and never a text of the caller
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = state.id
                if state.warning:
                    headers["Warning"] = state.warning
                if status >= 400:
                    self._count(scope, outcome_of(status))
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnect:
            self._count(scope, "cancelled")
        except Exception:
            log.exception("request %s failed", state.id)
            if status:  # too late to say so
                raise
            error = ApiError(500, "Something went wrong inside the server.", code="internal_error")
            await error.response(scope, receive, send_named)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            facts: Facts = {
                "request": state.id,
                "ms": milliseconds(time.perf_counter() - state.arrived),
            }
            if state.tenant != OPERATOR:
                facts["tenant"] = state.tenant
            if state.outcome is not None:
                facts["outcome"] = state.outcome
            line = (scope["method"], shorten(scope["path"]), status)
            log.log(level, "%s %s %d", *line, extra={"facts": facts | state.facts})

    def _count(self, scope: Scope, outcome: str) -> None:
        """Count a completions request that the route has not counted itself."""
        state = Request(scope).state
        asked = scope["path"] == COMPLETIONS and scope["method"] == "POST"
        if asked and state.outcome is None:
            state.outcome = outcome
            self.count(outcome)


def outcome_of(status: int) -> str:
    named = {429: "overloaded", 499: "cancelled", 503: "unavailable", 504: "timeout"}
    return named.get(status, "refused" if status < 500 else "error")


def _request_id(headers: Headers) -> str:
    """The caller's own id if it is short and harmless in a log; else a new one."""
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else f"req-{uuid.uuid4().hex}"


class Key:
    """Finds out who calls, and refuses whom nobody knows before anything of the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            tenant = self.keys.tenant(dict(scope["headers"]).get(b"authorization", b""))
            if tenant is None:
                message = "Send the API key: Authorization: Bearer KEY."
                headers = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, message, code="invalid_api_key", headers=headers)
                await error.response(scope, receive, send)
                return
            Request(scope).state.tenant = tenant
        await self.app(scope, receive, send)


class Readiness:
    """Answers 503 to all but probes and page until the engine is ready, and from its end on."""

    def __init__(self, app: ASGIApp, worker: Worker) -> None:
        self.app, self.worker = app, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = self.worker.state is not State.READY
        if scope["type"] == "http" and closed and scope["path"] not in PROBES | PAGE:
            await unavailable(self.worker.state).response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class BodyLimit:
    """Refuses a body that is too large or too slow, without a look at what is in it."""

    def __init__(self, app: ASGIApp, size: int, seconds: float) -> None:
        self.app, self.size, self.seconds = app, size, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self.size:
            await self._too_large().response(scope, receive, send)
            return
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self.seconds

        async def receive_limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"The body took longer than {self.seconds:g} seconds."
                ) from None
            size += len(message.get("body", b""))
            if size > self.size:  # a chunked body declares nothing
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self.size} bytes.")
