"""Describes a route: its path, who may use it, what it takes and what it answers.

    @operation("POST", "/v1/things", body=ThingRequest, answers={201: Thing}, refuses=(409,))
    async def create_thing(request: Request) -> Response:
        \"\"\"Make a thing.\"\"\"

The router (`app.py`) and `/openapi.json` (`openapi.py`) are both made from these. So every route is
described, and every description has a route. The docstring is the description. What every route may answer
(no key, too large, stopping) is added automatically.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from personae.api.tenants.access import OPEN, admin_only
from personae.errors import PersonaeError

Endpoint = Callable[[Request], Awaitable[Any]]

_ALWAYS = {400, 408, 413, 431, 500, 503}  # by the protocol, the gate and the drain
_GUARDED = {401, 403, 429}  # by the check of keys


@dataclass(frozen=True, slots=True)
class Content:
    """One form of a body: its media type, and the type of its content.

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
class ErrorForm:
    """How a route's errors are written if not as OpenAI's: the type of their bodies, and what makes one from
    an error and its request's id. `id_header` has the id, too. It holds for the paths below the route's."""

    type: Any
    body: Callable[[PersonaeError, str], Any]
    id_header: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `path` is Starlette's, with the names of its parameters in braces.

    `body` is the type of a JSON body, or another `Content`. `query` is a struct whose fields are the
    parameters after the `?`. `answers` has the successes: for each status a type (sent as JSON), a `Content`,
    or several. `refuses` are the error statuses that this route adds to those of every route. `error` is the
    form of their bodies if it is not OpenAI's.
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
    error: ErrorForm | None = None

    @property
    def open(self) -> bool:
        """Whether it is served without a key."""
        return self.path in OPEN

    @property
    def description(self) -> str:
        """What the route does."""
        return (self.endpoint.__doc__ or "").strip()

    @property
    def errors(self) -> list[int]:
        """Every status but those of `answers`."""
        return sorted(_ALWAYS | (set() if self.open else _GUARDED) | set(self.refuses))

    def route(self) -> Route:
        """The route for the router."""
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
    error: ErrorForm | None = None,
) -> Callable[[Endpoint], Operation]:
    """Make an endpoint an `Operation`. `admin` restricts it to admins' keys."""

    def declare(endpoint: Endpoint) -> Operation:
        guarded = admin_only(endpoint) if admin else endpoint
        return Operation(method, path, guarded, answers, body, query, headers, refuses, admin, error)

    return declare
