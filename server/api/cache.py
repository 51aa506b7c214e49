"""/v1/cache: the rows, at once and live, and the sessions of whoever asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from heapq import nlargest

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from server.api.errors import try_later
from server.api.openapi import ALWAYS, REF, errors
from server.api.schemas import (
    CacheAnswer,
    CacheEvent,
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
from server.engine.snapshot import Records, SessionRecord, Snapshot

router = APIRouter(tags=["cache"])

INTERVAL = 0.5  # seconds between two looks at the cache
MOST_SESSIONS = 100  # in an event; all are in /v1/cache and /v1/sessions
SILENCE = 15.0  # seconds until a comment shows a listener that the server is there

DATA = CacheEvent.model_json_schema(ref_template=REF)
del DATA["$defs"]  # other answers have them in the document
EVENT = StreamEvent.model_json_schema()
EVENT["properties"]["data"] |= {"contentMediaType": "application/json", "contentSchema": DATA}


@router.get("/v1/cache", summary="Rows and sessions", responses=errors(*ALWAYS))
async def cache(request: Request) -> CacheAnswer:
    """As of the last step of the engine; asking does not wait for it. With named keys it waits
    for the end of the step, and counts the caller's own rows alone.
    """
    service = Service.of(request)
    now = service.worker.snapshot
    records = now.sessions.of(request.state.tenant)
    return answer_of(service, now, records, await row_runs(request) if service.keyed else None)


def answer_of(
    service: Service, now: Snapshot, records: list[SessionRecord], own: list[RowRun] | None
) -> CacheAnswer:
    """`own` are the runs of rows to be counted for a caller who may not know those of others."""
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
    if own is not None:
        counts = own_counts(own)
    served = service.served
    return CacheAnswer(
        device=served.device,
        dtype=served.dtype,
        rows_dtype=served.rows_dtype,
        row_bytes=now.row_bytes,
        bytes=(counts.running + counts.idle) * now.row_bytes,
        rows=counts,
        totals=totals if own is None else None,
        sessions=[SessionAnswer.of(record) for record in records],
    )


@router.get("/v1/cache/rows", summary="State and owner of every row", responses=errors(*ALWAYS))
async def rows(request: Request) -> RowsAnswer:
    """All rows of the pool between two steps, as the caller may see them."""
    runs = await row_runs(request)
    return RowsAnswer(
        total=sum(run.n for run in runs), runs=[RowRunAnswer(**plain(run)) for run in runs]
    )


@router.get(
    "/v1/cache/events",
    summary="The cache, live",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-sent events, at most two a second: what `/v1/cache` says, with "
            f"the {MOST_SESSIONS} sessions that were used last, their number, and the runs of "
            "rows that have changed since the event before.",
            "content": {"text/event-stream": {"schema": EVENT}},
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
    """The events of one listener: first everything, then what has changed. While the engine's
    snapshots are equal, nothing has.
    """
    service, tenant = Service.of(request), request.state.tenant
    known: set[RowRun] = set()
    seen: Snapshot | None = None
    records: list[SessionRecord] = []
    n_sessions = 0
    before: tuple[CacheAnswer, int] | None = None
    silent_since = time.monotonic()
    while True:
        now = service.worker.snapshot
        turned = seen is None or now.sessions is not seen.sessions
        if turned:
            records, n_sessions = latest(now.sessions, tenant)
        if turned or now != seen:  # of the same sessions, which need not be compared
            seen = now
            runs = await row_runs(request)
            answer = answer_of(service, now, records, runs if service.keyed else None)
            if (answer, n_sessions) != before:
                changed = [plain(run) for run in runs if run not in known]
                known, before = set(runs), (answer, n_sessions)
                silent_since = time.monotonic()
                yield event({**answer.model_dump(), "n_sessions": n_sessions, "runs": changed})
        if time.monotonic() - silent_since > SILENCE:
            silent_since = time.monotonic()
            yield COMMENT
        await asyncio.sleep(INTERVAL)


def latest(records: Records, tenant: str) -> tuple[list[SessionRecord], int]:
    """The tenant's sessions that were used last, the oldest first; and how many there are."""
    own = [record for (owner, _), record in records.items() if owner == tenant]
    used_last = nlargest(MOST_SESSIONS, own, key=lambda record: record.last_used)
    return sorted(used_last, key=lambda record: (record.created, record.name)), len(own)


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


def plain(run: RowRun) -> dict[str, object]:
    return {name: getattr(run, name) for name in RowRunAnswer.model_fields}
