"""Reads when a client wants its answer, and which session it belongs to. These are headers, because they
concern a proxy as much as this server.

`X-Request-Timeout` says how long it waits, as `timeout` in a body does: seconds from the request's arrival.
The earliest deadline counts, including the server's own `--request-timeout`. When it passes, the request ends
with DeadlineExceeded wherever it is, in a queue or in the batch. Within a step everything that it held is
free.

`x-slo-ttft-ms` and `x-slo-tpot-ms` are targets for the first token and for each one after it. `x-slo-refuse:
true` asks for a 503 at once if the first token cannot be expected in time. `x-session-id` names a
conversation (`sessions/`).
"""

import math
from dataclasses import dataclass
from typing import Annotated

import anyio
from msgspec import Meta
from starlette.requests import Request

from personae.api.http.operation import HeaderParameter
from personae.api.sessions.store import checked_name
from personae.api.wire.prompt_cache import SessionName
from personae.engine.sequence import LatencyTargets
from personae.errors import RequestError

TIMEOUT_HEADER = "X-Request-Timeout"
TIMEOUT = HeaderParameter(
    TIMEOUT_HEADER,
    Annotated[float, Meta(gt=0)],
    "Seconds after which the client has no use for the answer; the request then ends with a 504.",
)
FIRST, EACH, REFUSE, SESSION = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-refuse", "x-session-id"
HEADERS = (
    HeaderParameter(FIRST, Annotated[float, Meta(gt=0)], "Milliseconds in which the first token is wanted."),
    HeaderParameter(EACH, Annotated[float, Meta(gt=0)], "Milliseconds that each token after it may take."),
    HeaderParameter(REFUSE, bool, "Whether to answer 503 at once if the first token cannot come in time."),
    HeaderParameter(
        SESSION,
        SessionName,
        "The conversation. Its keys and values are kept for its next request, which goes to the same engine.",
    ),
)
_LONGEST = 3_600_000.0  # milliseconds


@dataclass(frozen=True, slots=True)
class HeaderOptions:
    """What a request's headers say besides its caller. `arrived` is when the request arrived, None for now;
    `patience` is when its client has no more use for the answer. Both are on `anyio.current_time`'s clock.
    `session` is the session's name."""

    arrived: float | None = None
    patience: float = math.inf
    targets: LatencyTargets | None = None
    session: str | None = None


NO_OPTIONS = HeaderOptions()


def header_options(request: Request) -> HeaderOptions:
    """The options of a request. Raises RequestError that names the header."""
    return HeaderOptions(arrival(request), header_deadline(request), targets_of(request), session_of(request))


def seconds(value: float, param: str) -> float:
    """A timeout, checked. Raises RequestError."""
    if not value > 0:
        raise RequestError(f"`{param}` must be over 0.", param=param, code="out_of_range")
    return value


def header_deadline(request: Request) -> float:
    """When the header's time ends, on `anyio.current_time`'s clock; infinity without a header.

    Raises RequestError for a header that is not a positive number.
    """
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return math.inf
    name = TIMEOUT_HEADER.lower()
    return arrival(request) + seconds(_number(text, name, "seconds"), name)


def arrival(request: Request) -> float:
    """When the request arrived, on `anyio.current_time`'s clock."""
    came: float | None = getattr(request.state, "arrived", None)
    return anyio.current_time() if came is None else came


def targets_of(request: Request) -> LatencyTargets | None:
    """The targets of a request. None if it has none. Raises RequestError that names the header."""
    headers = request.headers
    if FIRST not in headers and EACH not in headers:
        if REFUSE in headers:
            raise RequestError(f"`{REFUSE}` needs `{FIRST}`.", param=REFUSE)
        return None
    refuse = headers.get(REFUSE, "false").lower()
    if refuse not in ("true", "false"):
        raise RequestError(f"`{REFUSE}` must be true or false.", param=REFUSE)
    first = _seconds(request, FIRST)
    if refuse == "true" and first is None:
        raise RequestError(f"`{REFUSE}` needs `{FIRST}`.", param=REFUSE)
    return LatencyTargets(first, _seconds(request, EACH), refuse == "true")


def session_of(request: Request) -> str | None:
    """The session's name. Raises RequestError if it is too long, or empty."""
    name = request.headers.get(SESSION)
    return None if name is None else checked_name(name, SESSION)


def _number(text: str, header: str, unit: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(
            f"`{header}` must be a number of {unit}.", param=header, code="invalid_type"
        ) from None


def _seconds(request: Request, header: str) -> float | None:
    text = request.headers.get(header)
    if text is None:
        return None
    value = _number(text, header, "milliseconds")
    if not 0 < value <= _LONGEST:
        raise RequestError(
            f"`{header}` must be over 0 and at most {_LONGEST:.0f}.", param=header, code="out_of_range"
        )
    return value / 1000
