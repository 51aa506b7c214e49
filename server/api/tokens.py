"""POST /tokenize and /detokenize, GET /tokenizer_info: token ids and back."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from model.tokenizer import END_OF_TEXT
from server.api.aside import aside
from server.api.bodies import read_body
from server.api.calls import LONG, check_ids, check_model, encode
from server.api.openapi import ALWAYS, WITH_BODY, errors, takes
from server.api.schemas import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfo,
)
from server.api.service import Service

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    summary="Text to token ids",
    response_model=TokenizeAnswer,
    responses=errors(404, *WITH_BODY),
    openapi_extra=takes(TokenizeBody, prompt="Once upon a time"),
)
async def tokenize(request: Request) -> Response:
    """The text may be longer than the context; only the size of the body is limited."""
    service = Service.of(request)
    body = await read_body(request, TokenizeBody)
    check_model(body.model, service.served, service.settings)
    served = service.served
    ids = await encode(body.prompt, served.tokenizer, special=body.parse_special)

    def answer() -> str:
        names = [served.token_names[token] for token in ids] if body.return_token_strs else None
        whole = TokenizeAnswer(
            count=len(ids), max_model_len=served.n_ctx, tokens=ids, token_strs=names
        )
        return whole.model_dump_json()

    content = await aside(len(ids) >= LONG, answer)
    return Response(content, media_type="application/json")


@router.post(
    "/detokenize",
    summary="Token ids to text",
    responses=errors(404, *WITH_BODY),
    openapi_extra=takes(DetokenizeBody, tokens=[0, 1, 2]),
)
async def detokenize(request: Request) -> DetokenizeAnswer:
    """Bytes that are no UTF-8 become U+FFFD."""
    service = Service.of(request)
    body = await read_body(request, DetokenizeBody)
    check_model(body.model, service.served, service.settings)
    served = service.served

    def text() -> str:
        check_ids(body.tokens, served, "tokens")
        return served.tokenizer.decode(body.tokens)

    return DetokenizeAnswer(prompt=await aside(len(body.tokens) >= LONG, text))


@router.get("/tokenizer_info", summary="The tokenizer", responses=errors(*ALWAYS))
async def tokenizer_info(request: Request) -> TokenizerInfo:
    served = Service.of(request).served
    return TokenizerInfo(
        vocab_size=served.n_vocab,
        model_max_length=served.n_ctx,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        eos_token_id=served.tokenizer.end_of_text,
    )
