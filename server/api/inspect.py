"""POST /v1/inspect: what one head looks at. For those who want to see the one row."""

from __future__ import annotations

import asyncio

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from model.step import Inspection
from server.api.answers import Json
from server.api.bodies import read_body
from server.api.calls import check_ids, check_model, encode
from server.api.errors import bad_request
from server.api.openapi import ALWAYS, WITH_BODY, errors, takes
from server.api.schemas import InspectAnswer, InspectBody
from server.api.service import Service
from server.api.sse import encode as encode_json
from server.engine.worker import Engine, Served

router = APIRouter(tags=["cache"])

# Half of a default step's budget: whoever inspects costs the others no more than a prompt would.
MAX_TOKENS = 128
DIGITS = 6


@router.post(
    "/v1/inspect",
    summary="The score grid of one head",
    responses={200: {"model": InspectAnswer}, **errors(404, *WITH_BODY, *ALWAYS)},
    openapi_extra=takes(InspectBody, prompt="Once upon a time", layer=0, head=0),
)
async def inspect(request: Request) -> Response:
    """Attention of one head over a text of up to 128 tokens: the grid of scores, what softmax makes
    of it, and its last row computed by itself. No row of the cache is read or written.
    """
    service = Service.of(request)
    body = await read_body(request, InspectBody)
    served = service.served
    check_model(body.model, served, service.settings)
    tokens = await _tokens(body.prompt, served)

    def look(engine: Engine) -> tuple[Inspection, int, int]:
        n_layer, n_head = engine.model.n_layer, engine.model.n_head
        for name, asked, there in (("layer", body.layer, n_layer), ("head", body.head, n_head)):
            if asked >= there:
                message = f"{name}: {asked}, but the model has {there}, counted from 0"
                raise bad_request(message, name)
        return engine.model.inspect(tokens, body.layer, body.head), n_layer, n_head

    async with service.inspecting:  # between two of them, the engine takes a step
        seen, n_layer, n_head = await service.worker.ask(look)
    head = {
        "tokens": tokens,
        "token_strs": [served.token_names[token] for token in tokens],
        "layer": body.layer,
        "head": body.head,
        "n_layer": n_layer,
        "n_head": n_head,
    }
    content = await asyncio.to_thread(_content, head, seen)
    return Response(content, media_type="application/json")


async def _tokens(prompt: str | list[int], served: Served) -> list[int]:
    limit = min(MAX_TOKENS, served.n_ctx)
    if isinstance(prompt, str):
        # Refused unread, if it is too long whatever its tokens are.
        if len(prompt.encode()) > limit * served.tokenizer.longest_token:
            raise bad_request(f"prompt: more than {limit} tokens", "prompt")
        ids = await encode(prompt, served.tokenizer)
    else:
        check_ids(prompt, served, "prompt")
        ids = prompt
    if len(ids) > limit:
        raise bad_request(f"prompt: {len(ids)} tokens; up to {limit} can be inspected", "prompt")
    return ids or [served.tokenizer.end_of_text]


def _content(head: Json, seen: Inspection) -> str:
    return encode_json(
        {
            **head,
            "scores": _triangle(seen.scores),
            "weights": _triangle(seen.weights),
            "row": _numbers(seen.row),
            "shapes": [shape._asdict() for shape in seen.shapes],
        }
    )


def _triangle(square: NDArray[np.float32]) -> list[list[float]]:
    """Rows of 1, 2, 3, ... numbers: a token sees itself and those before it."""
    return [_numbers(row[: i + 1]) for i, row in enumerate(square)]


def _numbers(row: NDArray[np.float32]) -> list[float]:
    return [round(number, DIGITS) for number in row.tolist()]
