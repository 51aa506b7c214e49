"""GET / and what belongs to it: the web page. It holds no data, so it needs no key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Nothing but the page's own files and this server's API. Trusted Types with no policy: a text
    # cannot become markup, not even by mistake.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Kept by the browser, and asked for again each time: a new version of onerow shows at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class File:
    content: bytes
    headers: dict[str, str]

    def answer(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self.headers["ETag"] in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def make_file(name: str, content: bytes, headers: dict[str, str]) -> File:
    kind = TYPES[name.rpartition(".")[2]]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return File(content, {**headers, "Content-Type": kind, "ETag": tag})


def _read() -> dict[str, File]:
    """All files of the page by their path; nothing else in the package can be asked for."""
    files = {}
    for file in resources.files("server").joinpath("page").iterdir():
        if file.name.rpartition(".")[2] in TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            files[path] = make_file(file.name, file.read_bytes(), HEADERS)
    return files


FILES = _read()


async def page(request: Request) -> Response:
    return FILES[request.url.path].answer(request)


for _path in FILES:
    router.add_api_route(_path, page, methods=["GET", "HEAD"])
