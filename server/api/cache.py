"""/v1/cache: the rows, at once and live, and the sessions of whoever asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from server.api.errors import try_later
from server.api.openapi import ALWAYS, errors
from server.api.schemas import (
    CacheAnswer,
    CacheTotals,
    ResetAnswer,
    RowCounts,
    RowRunAnswer,
    RowsAnswer,
    SessionAnswer,
    StreamEvent,
)
from server.api.service import MAX_LISTENERS, Service
from server.api.sse import COMMENT, EventStream, event
from server.engine.rowmap import RowRun

router = APIRouter(tags=["cache"])

INTERVAL = 0.5  # seconds between two looks at the cache
SILENCE = 15.0  # seconds until a comment shows a listener that the server is there


@router.get("/v1/cache", summary="Rows and sessions", responses=errors(*ALWAYS))
async def cache(request: Request) -> CacheAnswer:
    """As of the last step of the engine; asking does not wait for it. With named keys it waits
    for the end of the step, and counts the caller's own rows alone.
    """
    service = Service.of(request)
    served, now = service.served, service.worker.snapshot
    counts = RowCounts(
        total=now.rows,
        free=now.rows_free,
        running=now.rows_running,
        idle=now.rows_idle,
        shared=now.rows_shared,
    )
    totals = CacheTotals(
        **{name: getattr(now, f"{name}_total") for name in CacheTotals.model_fields}
    )
    if service.keyed:
        counts = own_counts(await row_runs(request))
    return CacheAnswer(
        device=served.device,
        dtype=served.dtype,
        rows_dtype=served.rows_dtype,
        row_bytes=now.row_bytes,
        bytes=(counts.running + counts.idle) * now.row_bytes,
        rows=counts,
        totals=None if service.keyed else totals,
        sessions=[SessionAnswer.of(record) for record in now.sessions.of(request.state.tenant)],
    )


@router.get("/v1/cache/rows", summary="State and owner of every row", responses=errors(*ALWAYS))
async def rows(request: Request) -> RowsAnswer:
    """All rows of the pool between two steps, as the caller may see them."""
    runs = await row_runs(request)
    return RowsAnswer(total=sum(run.n for run in runs), runs=[answer_of(run) for run in runs])


@router.get(
    "/v1/cache/events",
    summary="The cache, live",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events, at most two a second: the totals, and the runs of "
            "rows that have changed since the event before.",
            "content": {"text/event-stream": {"schema": StreamEvent.model_json_schema()}},
        },
        **errors(429, *ALWAYS),
    },
)
async def events(request: Request) -> Response:
    """An event when something has changed. Nothing is made while nobody listens."""
    service = Service.of(request)
    if service.listeners.locked():
        raise try_later(429, f"{MAX_LISTENERS} are listening already.", "too_many_listeners")
    await service.listeners.acquire()
    return EventStream(changes(request), service.listeners.release)


async def changes(request: Request) -> AsyncIterator[str]:
    """The events of one listener: first everything, then what has changed."""
    known: set[RowRun] = set()
    before: CacheAnswer | None = None
    silent_since = time.monotonic()
    while True:
        now = await cache(request)
        if now != before:
            runs = await row_runs(request)
            changed = [asdict(run) for run in runs if run not in known]
            known, before = set(runs), now
            silent_since = time.monotonic()
            yield event({**now.model_dump(), "runs": changed})
        elif time.monotonic() - silent_since > SILENCE:
            silent_since = time.monotonic()
            yield COMMENT
        await asyncio.sleep(INTERVAL)


@router.post("/v1/cache/reset", summary="Empty the cache", responses=errors(*ALWAYS))
async def reset(request: Request) -> ResetAnswer:
    """Free the caller's idle rows: anonymous sequences are forgotten, sessions keep their tokens.
    Requests that run keep theirs.
    """
    tenant = request.state.tenant
    dropped = await Service.of(request).worker.ask(lambda engine: engine.reset(tenant))
    return ResetAnswer(**asdict(dropped))


async def row_runs(request: Request) -> list[RowRun]:
    tenant = request.state.tenant
    return await Service.of(request).worker.ask(lambda engine: engine.row_runs(tenant))


def own_counts(runs: list[RowRun]) -> RowCounts:
    """The caller's own rows; all others count as free, whoever has them."""
    own = [run for run in runs if run.state in ("running", "idle")]
    total = sum(run.n for run in runs)
    running = sum(run.n for run in own if run.state == "running")
    idle = sum(run.n for run in own if run.state == "idle")
    shared = sum(run.n for run in own if run.holders > 1)
    free = total - running - idle
    return RowCounts(total=total, free=free, running=running, idle=idle, shared=shared)


def answer_of(run: RowRun) -> RowRunAnswer:
    return RowRunAnswer(**asdict(run))
