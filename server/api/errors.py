"""Every error in one shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
SHOWN = 64  # characters of a caller's value that a message repeats

CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    499: "client_left",
}


class ApiError(HTTPException):
    """An answer other than success. `param` names the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code or CODES.get(status)

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            self.status_code,
            "invalid_request_error" if self.status_code < 500 else "server_error",
        )
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        return JSONResponse(self.body, self.status_code, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_long(n_ctx: int, problem: str) -> ApiError:
    """The words before the comma are what client libraries look for."""
    message = f"This model's maximum context length is {n_ctx} tokens, {problem}"
    return bad_request(message, "prompt", "context_length_exceeded")


def try_later(status: int, message: str, code: str, seconds: int = 1) -> ApiError:
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})


def invalid(error: ValidationError) -> ApiError:
    """The first fault of a body: the field, and what is wrong with it."""
    fault = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] not in ("value_error", "missing"):
        message += f" (got {shown(fault['input'])})"
    return bad_request(f"{shorten(param)}: {message}" if param else message, shorten(param) or None)


def shown(value: object) -> str:
    """A caller's value as a message may repeat it: short, on one line, in ASCII."""
    if isinstance(value, str):
        return ascii(value if len(value) <= SHOWN else value[:SHOWN] + "...")
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**SHOWN else "a huge number"
    return "a list" if isinstance(value, list) else "an object"


def shorten(text: str) -> str:
    """A name from a body, as a message may repeat it."""
    return ascii(text)[1:-1][:SHOWN]


def install(app: FastAPI) -> None:
    """Answer every exception that a route can raise in the one shape."""
    app.add_exception_handler(HTTPException, _http_exception)


async def _http_exception(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response
    assert isinstance(error, HTTPException)
    headers = error.headers
    if error.status_code == 405:
        headers = {"Allow": ", ".join(_methods(request))}
    message = {
        404: f"There is no {request.method} {shorten(request.url.path)}.",
        405: f"{shorten(request.url.path)} does not take {request.method}.",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=headers).response


def _methods(request: Request) -> list[str]:
    """What a path takes. Starlette knows only the methods of the first of its routes."""
    scope = request.scope
    return [
        method
        for method in METHODS
        if any(
            route.matches({**scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]
