"""GET /v1/models: what is served."""

from __future__ import annotations

from fastapi import APIRouter, Request

from server.api.calls import check_model
from server.api.openapi import ALWAYS, errors
from server.api.schemas import ModelCard, ModelList
from server.api.service import Service

router = APIRouter(tags=["models"])


@router.get("/v1/models", summary="List the model that is served", responses=errors(*ALWAYS))
async def models(request: Request) -> ModelList:
    return ModelList(data=[card(Service.of(request))])


@router.get("/v1/models/{model:path}", summary="Describe the model", responses=errors(404, *ALWAYS))
async def model(request: Request, model: str) -> ModelCard:
    service = Service.of(request)
    check_model(model, service.served, service.settings)
    return card(service)


def card(service: Service) -> ModelCard:
    served = service.served
    return ModelCard(
        id=served.name, created=service.started, root=served.root, max_model_len=served.n_ctx
    )
