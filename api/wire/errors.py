"""Errors in their wire form, in OpenAI's shape: `{"error": {message, type, param, code}}`."""

import errno
import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from personae.api.storage import storage_failure
from personae.api.telemetry import logs
from personae.api.wire.compat_names import route_here
from personae.errors import (
    MethodNotAllowed,
    NotFound,
    Overloaded,
    PersonaeError,
    RequestError,
    RequestFailed,
    StorageFailed,
    Unauthorized,
)
from personae.grammar.fuzzy_match import nearest

logger = logging.getLogger(__name__)

_CLOSES = {408, 413, 431}
"""With these, the rest of the request is still arriving; the connection is closed rather than drained."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """An error: a message, its type, the field concerned, a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and the event that ends a broken stream."""

    error: ErrorDetail


def error_answer(error: PersonaeError) -> ErrorAnswer:
    """The wire form of an error."""
    param = None if error.param is None else _sendable(error.param)
    return ErrorAnswer(ErrorDetail(_sendable(error.message), error.type, param, error.code))


def error_response(error: PersonaeError, form: msgspec.Struct | None = None) -> Response:
    """The error as an HTTP answer, with Retry-After if the error says when to come back. Its body is `form`,
    else as OpenAI writes it."""
    logs.note(code=error.code)
    if isinstance(error, StorageFailed):
        logger.error("the storage failed: %s", error.__cause__ or error.message)
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.retry is False:
        headers["x-should-retry"] = "false"  # OpenAI's clients would otherwise try again after any 5xx
    if error.status in _CLOSES:
        headers["connection"] = "close"
    if error.status == Unauthorized.status:
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(error_answer(error) if form is None else form)
    return Response(body, error.status, headers, media_type="application/json")


def refusal(scope: Scope, error: PersonaeError) -> Response:
    """The error as the answer to this request, in the form of the API that it came by."""
    path, state = scope["path"], scope["state"]
    for route, form in scope["app"].state.error_forms.items():
        if path == route or path.startswith(f"{route}/"):
            state.setdefault("answer_headers", {})[form.id_header] = state["request_id"]
            return error_response(error, form.body(error, state["request_id"]))
    return error_response(error)


def _sendable(text: str) -> str:
    """Text that may repeat what a client sent, without the lone surrogates, which UTF-8 does not have."""
    return text.encode("utf-8", "backslashreplace").decode()


def visible(error: Exception, request_id: str) -> PersonaeError:
    """The error that the client may see: a PersonaeError as it is. Of any other error, only that it happened,
    or that the storage failed.

    The other error's details go to the log, under the request id that the client also has.
    """
    if isinstance(error, PersonaeError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        logger.error("request %s: too many open files", request_id)
        return Overloaded("The server has too many open files; try again later.", code="too_many_files")
    if (failure := storage_failure(error)) is not None:
        failure.__cause__ = error
        return failure
    logger.error("request %s failed unexpectedly", request_id, exc_info=error)
    return RequestFailed("The server could not finish this request.", code="internal_error")


async def personae_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for PersonaeError."""
    assert isinstance(error, PersonaeError)
    return refusal(request.scope, error)


def _hint(request: Request) -> str:
    """A suggestion of what was meant."""
    parts = [part for part in request.url.path.split("/") if part]
    while parts[:1] == ["v1"]:
        del parts[0]
    known = {path for route in request.app.routes if (path := getattr(route, "path", None)) is not None}
    plain = "/" + "/".join(parts)
    meant = next((route for route in (f"/v1{plain}", plain) if parts and route in known), None)
    if meant is not None:
        return f" There is {meant}."
    whole = sorted(path for path in known if "{" not in path)
    if (near := nearest(request.url.path, whole)) is not None:
        return f" Did you mean {near}?"
    if (here := route_here(request.url.path)) is not None:
        return f" {here}"
    tails = ("/".join(parts[start:]) for start in range(1, len(parts)))
    ours = next((route for tail in tails for route in (f"/v1/{tail}", f"/{tail}") if route in known), None)
    if ours is not None:
        return f" Here it is {ours}."
    return f" There are {', '.join(whole)}."


def _methods(request: Request) -> list[str]:
    """The methods of all routes of this path; the router names only those of the first."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    here = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in here for method in route.methods or ()})


async def http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for errors of its router: no such route, or no such method."""
    assert isinstance(error, HTTPException)
    scope, path, method = request.scope, request.url.path, request.method
    if error.status_code == NotFound.status:
        text = f"There is no route {path}.{_hint(request)}"
        return refusal(scope, NotFound(text, code="unknown_url"))
    if error.status_code == MethodNotAllowed.status:
        served = ", ".join(_methods(request))
        text = f"{path} does not serve {method}. It serves {served}."
        if (here := route_here(path)) is not None:
            text += f" {here}"
        response = refusal(scope, MethodNotAllowed(text))
        response.headers["allow"] = served
        return response
    other = RequestError(error.detail)
    other.status = error.status_code
    return refusal(scope, other)
