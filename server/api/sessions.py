"""/v1/sessions: what a session holds, and what can be done with it beside taking turns."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request

from server.api.bodies import read_body
from server.api.errors import ApiError, bad_request, shown, try_later
from server.api.lines import LineFull
from server.api.openapi import ALWAYS, WITH_BODY, errors, takes
from server.api.register import CANCELLED
from server.api.schemas import (
    DeletedAnswer,
    NewSessionBody,
    RewindBody,
    SessionAnswer,
    SessionList,
    SessionTextAnswer,
)
from server.api.service import Service
from server.engine.sessions import SessionView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.get("", summary="List sessions", responses=errors(*ALWAYS))
async def sessions(request: Request) -> SessionList:
    """The caller's sessions, as of the last step of the engine."""
    records = Service.of(request).worker.snapshot.sessions.of(request.state.tenant)
    return SessionList(data=[SessionAnswer.of(record) for record in records])


@router.post(
    "",
    status_code=201,
    summary="Create a session",
    responses=errors(409, *WITH_BODY),
    openapi_extra=takes(NewSessionBody, id="alice-1"),
)
async def create(request: Request) -> SessionTextAnswer:
    """An empty session. A completion with a new `session_id` creates its session as well."""
    service = Service.of(request)
    body = await read_body(request, NewSessionBody)
    tenant, name = request.state.tenant, body.id or new_name()
    view = await service.worker.ask(lambda engine: engine.create(tenant, name))
    if view is None:
        raise taken(name)
    return answer(view, service)


@router.get("/{session_id}", summary="Read a session", responses=errors(404, *ALWAYS))
async def read(request: Request, session_id: str) -> SessionTextAnswer:
    """What the session holds now; a turn that runs is not part of it yet."""
    service, tenant = Service.of(request), request.state.tenant
    view = await service.worker.ask(lambda engine: engine.session(tenant, session_id))
    if view is None:
        raise missing(session_id)
    return answer(view, service)


@router.delete("/{session_id}", summary="Delete a session", responses=errors(404, *ALWAYS))
async def delete(request: Request, session_id: str) -> DeletedAnswer:
    """Forget its tokens and free its rows. A turn that runs ends with `request_cancelled`."""
    service, tenant = Service.of(request), request.state.tenant
    running = service.turns.get((tenant, session_id))
    if running is not None:
        service.worker.end(running, CANCELLED, "The session was deleted.")
    async with in_line(service, tenant, session_id):
        found = await service.worker.ask(lambda engine: engine.forget(tenant, session_id))
    if not found and running is None:
        raise missing(session_id)
    return DeletedAnswer(id=session_id, deleted=True)


@router.post(
    "/{session_id}/fork",
    status_code=201,
    summary="Fork a session",
    responses=errors(404, 409, *WITH_BODY),
    openapi_extra=takes(NewSessionBody, id="alice-2"),
)
async def fork(request: Request, session_id: str) -> SessionTextAnswer:
    """A new session that holds the same tokens, and the very same rows: nothing is copied."""
    service = Service.of(request)
    body = await read_body(request, NewSessionBody)
    tenant, name = request.state.tenant, body.id or new_name()
    async with in_line(service, tenant, session_id):
        try:
            view = await service.worker.ask(lambda engine: engine.fork(tenant, session_id, name))
        except KeyError:
            raise missing(session_id) from None
    if view is None:
        raise taken(name)
    return answer(view, service)


@router.post(
    "/{session_id}/rewind",
    summary="Rewind a session",
    responses=errors(404, *WITH_BODY),
    openapi_extra=takes(RewindBody, turn=1),
)
async def rewind(request: Request, session_id: str) -> SessionTextAnswer:
    """Cut a session to its first `tokens`, or to where it stood after `turn` (0: empty)."""
    service, tenant = Service.of(request), request.state.tenant
    body = await read_body(request, RewindBody)
    if (body.tokens is None) == (body.turn is None):
        raise bad_request("tokens, turn: give one of the two", "tokens")
    async with in_line(service, tenant, session_id):
        view = await service.worker.ask(lambda engine: engine.session(tenant, session_id))
        if view is None:
            raise missing(session_id)
        n = body.tokens if body.tokens is not None else end_of_turn(view, body.turn or 0)
        if n > len(view.tokens):
            raise bad_request(f"tokens: the session has {len(view.tokens)}", "tokens")
        cut = await service.worker.ask(lambda engine: engine.rewind(tenant, session_id, n))
    assert cut is not None  # it was there a moment ago, and nobody else is in the line
    return answer(cut, service)


@asynccontextmanager
async def in_line(service: Service, tenant: str, name: str) -> AsyncIterator[None]:
    """Wait for the turns of a session that came before."""
    try:
        leave = await service.lines.enter((tenant, name))
    except LineFull:
        raise queue_full() from None
    try:
        yield
    finally:
        leave()


def queue_full() -> ApiError:
    return try_later(429, "Too many completions are waiting. Try again soon.", "queue_full")


def missing(name: str) -> ApiError:
    """The same for a session that never was, one that has expired, and one of somebody else."""
    return ApiError(404, f"There is no session {shown(name)}.", code="session_not_found")


def taken(name: str) -> ApiError:
    # Clients repeat a 409 by themselves, which would not help.
    headers = {"X-Should-Retry": "false"}
    message = f"id: there is a session {shown(name)} already"
    return ApiError(409, message, param="id", code="session_exists", headers=headers)


def new_name() -> str:
    return f"session-{uuid.uuid4().hex}"


def end_of_turn(view: SessionView, turn: int) -> int:
    if turn > len(view.turn_ends):
        raise bad_request(f"turn: the session holds {len(view.turn_ends)} turns", "turn")
    return view.turn_ends[turn - 1] if turn else 0


def answer(view: SessionView, service: Service) -> SessionTextAnswer:
    return SessionTextAnswer(
        **SessionAnswer.of(view.record).model_dump(),
        text=service.served.tokenizer.decode(view.tokens),
        token_ids=list(view.tokens),
        turn_ends=list(view.turn_ends),
    )
