"""GET /v1/cache: the rows, and the sessions of whoever asks."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.api.openapi import ALWAYS, errors
from server.api.schemas import CacheAnswer, CacheTotals, RowCounts, SessionAnswer
from server.api.service import Service

router = APIRouter(tags=["cache"])


@router.get("/v1/cache", summary="Rows and sessions", responses=errors(*ALWAYS))
async def cache(request: Request) -> CacheAnswer:
    """As of the last step of the engine; asking does not wait for it."""
    service = Service.of(request)
    served, now = service.served, service.worker.snapshot
    return CacheAnswer(
        device=served.device,
        dtype=served.dtype,
        row_bytes=now.row_bytes,
        bytes=(now.rows - now.rows_free) * now.row_bytes,
        rows=RowCounts(
            total=now.rows,
            free=now.rows_free,
            running=now.rows_running,
            idle=now.rows_idle,
            shared=now.rows_shared,
        ),
        totals=CacheTotals(
            **{name: getattr(now, f"{name}_total") for name in CacheTotals.model_fields}
        ),
        sessions=[
            SessionAnswer(
                id=record.name,
                tokens=record.tokens,
                rows=record.rows,
                bytes=record.bytes,
                turns=record.turns,
                created=record.created,
                last_used=record.last_used,
            )
            for (tenant, _), record in now.sessions.items()
            if tenant == request.state.tenant
        ],
    )
