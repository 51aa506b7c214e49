"""From the bytes of a request to a checked body."""

from __future__ import annotations

import logging
import re
from email.message import Message
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from server.api.aside import aside
from server.api.errors import ApiError, bad_request, invalid
from server.api.schemas import Body

log = logging.getLogger("onerow")

LONG = 16 * 1024  # bytes from which on parsing leaves the event loop
B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B]) -> B:
    """Parse and check the body. Unknown fields are accepted, and named in a warning header."""
    if _media_type(request) != "application/json":
        # Not even an absent type: a web page may send that to us without being asked for leave.
        raise ApiError(415, "The body must be JSON: send Content-Type: application/json.")
    data = await request.body()
    body = await aside(len(data) >= LONG, lambda: _parse(data, kind))
    if unknown := body.unknown:
        names = ", ".join(re.sub(r"[^A-Za-z0-9_.-]", "?", name[:40]) for name in unknown[:10])
        log.warning("unknown fields ignored: %s", names)
        request.state.warning = f'299 onerow "unknown fields ignored: {names}"'
    return body


def _media_type(request: Request) -> str:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "none/none")
    return header.get_content_type()


def _parse(data: bytes, kind: type[B]) -> B:
    if not data:
        raise bad_request("The body is empty; it must be a JSON object.")
    try:
        return kind.model_validate(from_json(data, allow_inf_nan=False))
    except ValidationError as error:  # a ValueError, too
        raise invalid(error) from error
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from error
