"""The gate before every route: request ids, limits on headers and body, an answer to uncaught errors."""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NoReturn

import anyio
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from personae.api.settings import ApiSettings
from personae.api.telemetry import logs, orca
from personae.api.telemetry.metrics import Metrics
from personae.api.wire.errors import refusal, visible
from personae.errors import PayloadTooLarge, PersonaeError, RequestError, RequestTimeout
from personae.kernels.sizes import size_text

_FORM_BYTES = 2**21  # what an upload may have in addition to its tensors
_CLOSE = (b"connection", b"close")
_UPLOADS = {("POST", "/v1/adapters"): "max_upload_bytes", ("POST", "/v1/files"): "max_file_bytes"}
"""Routes that accept files in a form, and the setting that limits these."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:$#/~\[\]-]")
_LIMITED = 429
_LONGEST_NAME = 100
_LONGEST_LIST = 1000  # characters
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class Gate:
    """Pure ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; whatever happens, there is an answer with an id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {}).update(request_id=request_id, arrived=anyio.current_time())
        settings, begun = self._settings, time.perf_counter()
        is_form = headers.get(b"content-type", b"").lower().startswith(b"multipart/")
        upload = _UPLOADS.get((scope["method"], scope["path"])) if is_form else None
        body = _Body(
            receive,
            getattr(settings, upload) + _FORM_BYTES if upload else settings.max_body_bytes,
            settings.upload_seconds if upload else settings.body_seconds,
            complete=scope["method"] != "POST" and not _announces_a_body(headers),
        )
        status, wanted = 0, headers.get(orca.FORMAT_HEADER)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if ignored := scope["state"].get("ignored"):
                    message["headers"].append((b"x-personae-ignored", _listed(ignored)))
                limits = scope["state"].get("rate_limits", dict)()
                for name, value in (scope["state"].get("answer_headers", {}) | limits).items():
                    message["headers"].append((name.encode(), value.encode()))
                if wanted is not None and (load := self._metrics.load(wanted)) is not None:
                    message["headers"].append((orca.LOAD_HEADER, load))
                if not body.complete:  # its rest is never read
                    message["headers"] = [*(h for h in message["headers"] if h[0] != b"connection"), _CLOSE]
            await send(message)

        with logs.request(request_id):
            try:
                self._check(scope)
                body.check(headers.get(b"content-length", b"0"))
                await self._app(scope, body.receive, send_with_id)
            except Exception as error:
                shown = visible(error, request_id)
                if status:
                    raise _Broken(shown.message) from None
                await refusal(scope, shown)(scope, receive, send_with_id)
            finally:
                method, route, status = scope["method"], _route(scope), status or 499
                self._metrics.http.labels(method, route, str(status)).inc()
                if self._metrics.tenants is not None and status == _LIMITED and "caller" in scope["state"]:
                    self._metrics.tenants.refused(scope["state"]["caller"].tenant)
                logs.answered(method, scope["path"], route, status, time.perf_counter() - begun)

    def _check(self, scope: Scope) -> None:
        settings = self._settings
        pairs = scope["headers"]
        if len(pairs) > settings.max_headers:
            _refuse_headers(f"The request has more than {settings.max_headers} headers.")
        if sum(len(name) + len(value) for name, value in pairs) > settings.max_header_bytes:
            _refuse_headers(f"The request's headers have more than {settings.max_header_bytes} bytes.")
        codings = [value.strip().lower() for name, value in pairs if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:  # a body in another coding would be read as if it were plain
            raise RequestError(
                "Of transfer encodings only chunked is supported.",
                param="transfer-encoding",
                code="unsupported_transfer_encoding",
            )


class Prefix:
    """Pure ASGI middleware for a server behind a proxy that serves it under a prefix.

    Proxies strip the prefix or pass it on; the path is the same either way.
    """

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whose path may begin with the prefix."""
        if scope["type"] == "http":
            scope = {**scope, "path": without_prefix(scope["path"], self._prefix)}
        await self._app(scope, receive, send)


def without_prefix(path: str, prefix: str) -> str:
    """The path of a route."""
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


class _Body:
    """A request's body as it arrives: complete within its limit and its time, or refused."""

    def __init__(self, receive: Receive, limit: int, seconds: float, *, complete: bool) -> None:
        self._receive = receive
        self._limit = limit
        self._left = limit
        self._seconds = seconds
        self._deadline: float | None = None
        self.complete = complete

    def check(self, length: bytes) -> None:
        """Raises PayloadTooLarge for a content-length that is invalid or over the limit."""
        if not length.isdigit() or int(length[:20]) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next piece; after the last one, whatever arrives."""
        if self.complete:
            return await self._receive()
        now = anyio.current_time()
        self._deadline = now + self._seconds if self._deadline is None else self._deadline
        try:
            with anyio.fail_after(self._deadline - now):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The request's body did not arrive within {self._seconds:g} seconds.", param="body"
            ) from None
        self._left -= len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self._left < 0:
            raise self._too_large()
        return message

    def _too_large(self) -> PersonaeError:
        return PayloadTooLarge(f"The body is over the limit of {size_text(self._limit)}.", param="body")


class _Broken(Exception):
    """An answer failed after its status line. The server closes the connection, so that the client
    notices."""


def _route(scope: Scope) -> str:
    """The route's path as it is declared, also for a request that was refused before the router."""
    for route in [scope["route"]] if "route" in scope else scope["app"].routes:
        if route.matches(scope)[0] is not Match.NONE:
            return str(route.path)
    return "unknown"


def _announces_a_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _request_id(given: bytes) -> str:
    """The client's own id if it is short and plain, otherwise a new one."""
    text = given.decode("latin-1")
    return text if _SANE_ID.fullmatch(text) else uuid.uuid4().hex


def _listed(names: Sequence[str]) -> bytes:
    """Names, some of them a client's, as the value of a header; "..." replaces those beyond the limit."""
    listed = b""
    for name in dict.fromkeys(names):
        shown = _UNSAFE.sub("?", name[:_LONGEST_NAME]).encode()
        if len(listed) + len(shown) > _LONGEST_LIST:
            return listed + b", ..."
        listed += b", " + shown if listed else shown
    return listed


def _refuse_headers(message: str) -> NoReturn:
    error = PayloadTooLarge(message, param="headers")
    error.status = 431
    raise error
