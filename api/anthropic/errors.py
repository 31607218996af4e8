"""Errors of `/v1/messages` in Anthropic's shape: `{"type": "error", "error": {type, message}}`."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from personae.api.anthropic.answers import AnthropicError, AnthropicErrorDetail, ErrorDetails
from personae.api.params import shown
from personae.api.wire.errors import ErrorAnswer, error_answer
from personae.errors import ContextLengthExceeded, PersonaeError

PREFIX = "/v1/messages"
NO_THREADS = "thread_unsupported_request"
"""The code that tells Anthropic's clients to send the whole conversation."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: PersonaeError, request_id: str | None = None) -> AnthropicError:
    """The wire form of an error."""
    return _translated(error.status, error_answer(error), request_id)


@contextmanager
def anthropics_words() -> Iterator[None]:
    """Errors about the context's length inside the block have the words of Anthropic's API. Claude Code finds
    the numbers in them, and asks again for less or with a shorter conversation."""
    try:
        yield
    except ContextLengthExceeded as error:
        limit, prompt, asked = error.limit, error.prompt, error.asked
        if asked is None:
            counted = f"at least {limit + 1}" if prompt is None else str(prompt)
            error.message = f"prompt is too long: {counted} tokens > {limit} maximum"
        else:
            error.message = (
                f"input length and `max_tokens` exceed context limit: {prompt} + {shown(asked)} > {limit}, "
                "decrease input length or `max_tokens` and try again"
            )
        raise


def _translated(status: int, answer: ErrorAnswer, request_id: str | None) -> AnthropicError:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = answer.error
    details = ErrorDetails(NO_THREADS, ["thread"]) if error.code == NO_THREADS else None
    detail = AnthropicErrorDetail(kind, error.message, error.param, error.code, details)
    return AnthropicError(detail, request_id)


class AnthropicErrors:
    """Pure ASGI middleware around the whole app. A refusal of a request to these paths, whether by the gate,
    the check of keys, the router or the route, has Anthropic's shape, with its id in `request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PREFIX or path.startswith(f"{PREFIX}/")):
            await self._app(scope, receive, send)
            return
        refused: Message | None = None
        request_id: str | None = None

        async def translated(message: Message) -> None:
            nonlocal refused, request_id
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                id = headers.get(b"x-request-id", b"")
                request_id = id.decode("latin-1")
                message["headers"] = [*message["headers"], (b"request-id", id)]
                if message["status"] >= 400 and headers.get(b"content-type") == b"application/json":
                    refused = message  # until its body is known
                    return
            elif refused is not None:
                answer = msgspec.json.decode(message["body"], type=ErrorAnswer)
                body = msgspec.json.encode(_translated(refused["status"], answer, request_id))
                kept = [header for header in refused["headers"] if header[0] != b"content-length"]
                refused["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
                await send(refused)
                refused = None
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, translated)
