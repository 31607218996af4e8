"""Reads when a client wants its answer, and which session it belongs to. These are headers, because they
concern a proxy as much as this server.

`x-slo-ttft-ms` and `x-slo-tpot-ms` are targets for the first token and for each one after it. `x-slo-refuse:
true` asks for a 503 at once if the first token cannot be expected in time. `x-session-id` names a
conversation (`sessions/`).
"""

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request

from personae.api.deadline import arrival, header_deadline
from personae.api.http.operation import HeaderParameter
from personae.api.sessions.store import checked_name
from personae.api.wire.prompt_cache import SessionName
from personae.engine.sequence import LatencyTargets
from personae.errors import RequestError

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


def _seconds(request: Request, header: str) -> float | None:
    text = request.headers.get(header)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise RequestError(
            f"`{header}` must be a number of milliseconds.", param=header, code="invalid_type"
        ) from None
    if not 0 < value <= _LONGEST:
        raise RequestError(
            f"`{header}` must be over 0 and at most {_LONGEST:.0f}.", param=header, code="out_of_range"
        )
    return value / 1000
