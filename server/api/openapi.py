"""Words for the OpenAPI document that several routes share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.api.schemas import (
    Body,
    CompletionBody,
    DetokenizeBody,
    ErrorAnswer,
    InspectBody,
    NewSessionBody,
    RewindBody,
    TokenizeBody,
)

Responses = dict[int | str, dict[str, Any]]

BODIES: tuple[type[Body], ...] = (
    CompletionBody,
    TokenizeBody,
    DetokenizeBody,
    InspectBody,
    NewSessionBody,
    RewindBody,
)
REF = "#/components/schemas/{model}"
DESCRIPTIONS = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing; for a model, the message says which is served.",
    408: "The body took too long to arrive.",
    409: "The name is taken.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many completions are waiting; see Retry-After.",
    499: "The request was cancelled.",
    500: "The engine or the server failed.",
    503: "The server is loading or shutting down; see Retry-After.",
    504: "The answer took longer than the server's limit.",
}
ALWAYS = (401, 500, 503)
WITH_BODY = (400, 408, 413, 415, *ALWAYS)


def errors(*statuses: int) -> Responses:
    return {
        status: {"model": ErrorAnswer, "description": DESCRIPTIONS[status]}
        for status in sorted(statuses)
    }


def takes(body: type[BaseModel], **example: object) -> dict[str, Any]:
    """Extra words for a route that reads its body itself."""
    content = {"schema": {"$ref": REF.format(model=body.__name__)}, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the bodies' schemas, and take out FastAPI's own 422, which is never sent."""
    schemas = document["components"]["schemas"]
    _, bodies = models_json_schema([(body, "validation") for body in BODIES], ref_template=REF)
    schemas.update(bodies["$defs"])
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document
