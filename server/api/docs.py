"""GET /docs: the OpenAPI document to read and to try out, without any outside host."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Request, Response

from server.api.page import HEADERS, File, make_file

router = APIRouter(include_in_schema=False)

SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")  # which fastapi-offline brings along
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI has style attributes
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def _read() -> dict[str, File]:
    headers = {**HEADERS, "Content-Security-Policy": POLICY}
    own = resources.files("server").joinpath("docs")
    swagger = resources.files("fastapi_offline").joinpath("static")
    return {
        "/docs": make_file("index.html", own.joinpath("index.html").read_bytes(), headers),
        "/docs/start.js": make_file("start.js", own.joinpath("start.js").read_bytes(), headers),
        **{
            f"/docs/{name}": make_file(name, swagger.joinpath(name).read_bytes(), headers)
            for name in SWAGGER
        },
    }


FILES = _read()


async def docs(request: Request) -> Response:
    return FILES[request.url.path].answer(request)


for _path in FILES:
    router.add_api_route(_path, docs, methods=["GET", "HEAD"])
