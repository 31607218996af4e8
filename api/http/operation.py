"""What a route is: where it lies, who may use it, what goes in and what comes out.

    @operation("POST", "/v1/things", body=ThingRequest, answers={201: Thing}, refuses=(409,))
    async def create_thing(request: Request) -> Response:
        \"\"\"Make a thing.\"\"\"

The router (`app.py`) and `/openapi.json` (`openapi.py`) are both made from these, so there is no route that
is not described and no description without a route. The docstring is the description; what every route may
answer (no key, too large, stopping) is added by itself.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from personae.api.tenants.access import OPEN, admin_only

Endpoint = Callable[[Request], Awaitable[Any]]

_ALWAYS = {400, 408, 413, 431, 500, 503}  # from the protocol, the gate and the drain
_GUARDED = {401, 403, 429}  # from the lock


@dataclass(frozen=True, slots=True)
class Content:
    """One form in which a body comes: its media type, and the type of what is in it.

    For server-sent events `type` is that of one event's data.
    """

    media_type: str
    type: Any = str


def events(type: Any) -> Content:
    """A stream of server-sent events."""
    return Content("text/event-stream", type)


@dataclass(frozen=True, slots=True)
class HeaderParameter:
    """A header that a route reads."""

    name: str
    type: Any
    description: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `path` is Starlette's, with the names of its parameters in braces.

    `body` is the type of a JSON body, or another `Content`; `query` a struct whose fields are the parameters
    after the `?`. `answers` has the successes: for each status a type (sent as JSON), a `Content`, or
    several. `refuses` are the error statuses that this route adds to those of every route,
    `error` the type of their bodies where it is not OpenAI's.
    """

    method: str
    path: str
    endpoint: Endpoint
    answers: Mapping[int, Any]
    body: Any = None
    query: Any = None
    headers: tuple[HeaderParameter, ...] = ()
    refuses: tuple[int, ...] = ()
    admin: bool = False
    error: Any = None

    @property
    def open(self) -> bool:
        """Whether it is served without a key."""
        return self.path in OPEN

    @property
    def description(self) -> str:
        """What it does."""
        return (self.endpoint.__doc__ or "").strip()

    @property
    def errors(self) -> list[int]:
        """Every status but those of `answers`."""
        return sorted(_ALWAYS | (set() if self.open else _GUARDED) | set(self.refuses))

    def route(self) -> Route:
        """For the router."""
        return Route(self.path, self.endpoint, methods=[self.method])


def operation(
    method: str,
    path: str,
    *,
    answers: Mapping[int, Any],
    body: Any = None,
    query: Any = None,
    headers: tuple[HeaderParameter, ...] = (),
    refuses: tuple[int, ...] = (),
    admin: bool = False,
    error: Any = None,
) -> Callable[[Endpoint], Operation]:
    """Make an endpoint an `Operation`; `admin` closes it to keys that are not an admin's."""

    def declare(endpoint: Endpoint) -> Operation:
        guarded = admin_only(endpoint) if admin else endpoint
        return Operation(method, path, guarded, answers, body, query, headers, refuses, admin, error)

    return declare
