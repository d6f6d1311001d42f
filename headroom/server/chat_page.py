"""GET / and /page/FILE: the chat page, for people with a browser and nothing else.

The page is plain HTML, CSS and JavaScript modules in the folder `page`. It keeps conversations in
the browser and asks the same endpoints as every other client. Its files are public: they hold
nothing of the model, and the page must load before it can ask for an API key.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from headroom.server.refusals import RefusalError

router = APIRouter()

INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Text of a model must never run as code or reach another host, whatever the page's code does:
# scripts and styles come from this server's files alone, requests go to this server alone, and
# strings cannot become HTML (Trusted Types).
CONTENT_POLICY = "; ".join(
    [
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
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A browser keeps the files and asks each time whether they have changed.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, as it is sent."""

    content: bytes = field(repr=False)
    media_type: str
    tag: str  # the ETag: equal for equal contents


@cache
def page_files() -> dict[str, PageFile]:
    """Return all files of the page by name."""
    found: dict[str, PageFile] = {}
    for entry in files("headroom.server").joinpath("page").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[entry.name] = PageFile(content, MEDIA_TYPES[suffix], tag)
    return found


@router.api_route("/", methods=["GET", "HEAD"], response_model=None)
async def chat_page(request: Request) -> Response:
    """Return the page; agents also ask for the root to see whether a server is there."""
    return _answer(request, INDEX)


@router.api_route("/page/{name}", methods=["GET", "HEAD"], response_model=None)
async def page_file(request: Request, name: str) -> Response:
    """Return one file of the page."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        raise RefusalError(404, "unknown_url", f"The chat page has no file {name[:100]!r}.")
    headers = {**HEADERS, "ETag": file.tag}
    known = request.headers.get("if-none-match", "")
    if any(tag.strip().removeprefix("W/") in (file.tag, "*") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
