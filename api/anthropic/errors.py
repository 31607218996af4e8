"""Errors of `/v1/messages` in Anthropic's shape: `{"type": "error", "error": {type, message}}`."""

from collections.abc import Iterator
from contextlib import contextmanager

from personae.api.anthropic.answers import AnthropicError, AnthropicErrorDetail, ErrorDetails
from personae.api.http.operation import ErrorForm
from personae.api.params import shown
from personae.api.wire.errors import error_answer
from personae.errors import ContextLengthExceeded, PersonaeError

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
    status, plain = error.status, error_answer(error).error
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = ErrorDetails(NO_THREADS, ["thread"]) if plain.code == NO_THREADS else None
    return AnthropicError(
        AnthropicErrorDetail(kind, plain.message, plain.param, plain.code, details), request_id
    )


ERRORS = ErrorForm(AnthropicError, anthropic_error, "request-id")


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
