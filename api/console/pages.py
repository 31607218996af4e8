"""The console's page and its files. They need no key: the page asks for one and keeps it in memory."""

import html
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from personae.api.exchange import exchange_of
from personae.api.http.operation import Content, operation
from personae.errors import NotFound

STATIC = Path(__file__).resolve().parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

HEADERS = {
    # No inline script or style, nothing from other sites, no frames, no forms to other sites.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_PAGE = Content("text/html")


@operation("GET", "/", answers={200: _PAGE})
async def home(request: Request) -> Response:
    """Show the console."""
    return _page(request)


@operation("GET", "/console", answers={200: _PAGE})
async def console(request: Request) -> Response:
    """Show the console."""
    return _page(request)


@operation("GET", "/docs", answers={200: _PAGE})
async def docs(request: Request) -> Response:
    """Show the API's description in a readable form."""
    return _page(request)


def _page(request: Request) -> Response:
    return Response(_index(exchange_of(request).settings.root_path), headers=HEADERS, media_type="text/html")


@operation(
    "GET",
    "/console/{name}",
    answers={200: tuple(Content(type) for type in _TYPES.values())},
    refuses=(404,),
)
async def console_file(request: Request) -> Response:
    """Send one of the console's files."""
    name = request.path_params["name"]
    file = _files().get(name)
    if file is None:
        raise NotFound(f"The console has no file `{name[:80]}`.", param="name")
    return Response(file.read_bytes(), headers=HEADERS, media_type=_TYPES[file.suffix])


@cache
def _files() -> dict[str, Path]:
    """The files by name; a request names one of these, never a path."""
    return {file.name: file for file in STATIC.rglob("*") if file.suffix in _TYPES}


@cache
def _index(root_path: str) -> str:
    """The page, with addresses relative to the path under which the server is reached."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    return page.replace("{root}", html.escape(f"{root_path}/", quote=True))
