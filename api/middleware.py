"""The gate before every route: request ids, limits on headers and body, an answer to what nobody caught."""

import re
import uuid
from typing import NoReturn

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from personae.api.errors import error_response, visible
from personae.api.metrics import Metrics
from personae.api.settings import ApiSettings
from personae.errors import PayloadTooLarge, PersonaeError, RequestTimeout

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
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), send_with_id)
        except Exception as error:
            shown = visible(error, request_id)
            if status:
                raise _Broken(shown.message) from None
            await error_response(shown)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.http.labels(scope["method"], route, str(status or 499)).inc()

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        settings = self._settings
        pairs = scope["headers"]
        if len(pairs) > settings.max_headers:
            _refuse_headers(f"The request has more than {settings.max_headers} headers.")
        if sum(len(name) + len(value) for name, value in pairs) > settings.max_header_bytes:
            _refuse_headers(f"The request's headers have more than {settings.max_header_bytes} bytes.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > settings.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """`receive` until the body is complete within its limit and its time; then just `receive`."""
        settings = self._settings
        left = settings.max_body_bytes
        deadline: float | None = None
        complete = False

        async def limited() -> Message:
            nonlocal left, deadline, complete
            if complete:
                return await receive()
            now = anyio.current_time()
            deadline = now + settings.body_seconds if deadline is None else deadline
            try:
                with anyio.fail_after(deadline - now):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"The request's body did not arrive within {settings.body_seconds:g} seconds.",
                    param="body",
                ) from None
            left -= len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if left < 0:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> PersonaeError:
        return PayloadTooLarge(
            f"The body is over the limit of {self._settings.max_body_bytes} bytes.", param="body"
        )


class _Broken(Exception):
    """An answer broke off after its status line; the server closes the connection, so the client notices."""


def _request_id(given: bytes) -> str:
    """The client's own id if it is short and plain, else a new one."""
    text = given.decode("latin-1")
    return text if _SANE_ID.fullmatch(text) else uuid.uuid4().hex


def _refuse_headers(message: str) -> NoReturn:
    error = PayloadTooLarge(message, param="headers")
    error.status = 431
    raise error
