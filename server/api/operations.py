"""GET /health, /ready, /metrics, /version: for those who run the server."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api.errors import ApiError
from server.api.keys import OPERATOR
from server.api.openapi import errors
from server.api.schemas import StatusAnswer, VersionAnswer
from server.api.service import Service, unavailable
from server.engine.worker import State
from server.version import VERSION

router = APIRouter(tags=["operations"])


@router.get("/health", summary="Is it alive?", responses=errors(503))
async def health(request: Request) -> StatusAnswer:
    """200 from the start on, also while loading; 503 only when the engine has failed."""
    state = Service.of(request).worker.state
    if state is State.FAILED:
        raise unavailable(state)
    return StatusAnswer(status=state.value)


@router.get("/ready", summary="Does it take work?", responses=errors(503))
async def ready(request: Request) -> StatusAnswer:
    """200 once a test generation has worked, until the shutdown begins."""
    state = Service.of(request).worker.state
    if state is not State.READY:
        raise unavailable(state)
    return StatusAnswer(status=state.value)


@router.get("/version", summary="Which version is it?")
async def version() -> VersionAnswer:
    return VersionAnswer(version=VERSION)


# Not in the OpenAPI document, where FastAPI cannot describe a route of two methods.
@router.api_route("/metrics", methods=["GET", "HEAD"], include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus metrics, as of the engine's last step. They count what everyone does, so with
    named keys they are for the unnamed one alone.
    """
    if request.state.tenant != OPERATOR:
        raise ApiError(403, "Metrics are for the operator: send the key of --api-key.")
    content, content_type = Service.of(request).metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": content_type})
