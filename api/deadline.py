"""How long a client waits for its answer: `timeout` in the body, or the header `X-Request-Timeout`.

Both are seconds from the request's arrival. The earliest deadline counts, including the server's own
`--request-timeout`. When it passes, the request ends with DeadlineExceeded wherever it is, in a queue or in
the batch. Within a step everything that it held is free.
"""

import math
from typing import Annotated

import anyio
from msgspec import Meta
from starlette.requests import Request

from personae.api.http.operation import HeaderParameter
from personae.errors import RequestError

HEADER = "X-Request-Timeout"
TIMEOUT = HeaderParameter(
    HEADER,
    Annotated[float, Meta(gt=0)],
    "Seconds after which the client has no use for the answer; the request then ends with a 504.",
)


def seconds(value: float, param: str) -> float:
    """A timeout, checked. Raises RequestError."""
    if not value > 0:
        raise RequestError(f"`{param}` must be over 0.", param=param, code="out_of_range")
    return value


def header_deadline(request: Request) -> float:
    """When the header's time ends, on `anyio.current_time`'s clock; infinity without a header.

    Raises RequestError for a header that is not a positive number.
    """
    text = request.headers.get(HEADER)
    if text is None:
        return math.inf
    name = HEADER.lower()
    try:
        value = float(text)
    except ValueError:
        raise RequestError(
            f"`{name}` must be a number of seconds.", param=name, code="invalid_type"
        ) from None
    return arrival(request) + seconds(value, name)


def arrival(request: Request) -> float:
    """When the request arrived, on `anyio.current_time`'s clock."""
    came: float | None = getattr(request.state, "arrived", None)
    return anyio.current_time() if came is None else came
