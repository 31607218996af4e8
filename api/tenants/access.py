"""Authenticates every request, before anything else happens.

Every route needs a key unless it is in OPEN. A route for operators only is marked with `admin_only`. As long
as no key was ever made, there is one tenant, `default`, and everyone who reaches the server is its admin. The
server then listens on the loopback address only, unless --insecure-no-auth is given.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from personae.api.telemetry import logs
from personae.api.tenants.limits import Meter
from personae.api.tenants.store import DEFAULT_TENANT, Identity, TenantStore
from personae.errors import Forbidden, Unauthorized

if TYPE_CHECKING:
    from personae.api.tenants.usage import UsageLedger
    from personae.api.tenants.workers import Turn

_PROBES = frozenset({"/health", "/ready", "/ping"})  # they answer yes or no; probes cannot send keys
_PAGES = frozenset({"/", "/console", "/docs", "/console/{name}"})  # static files; the page asks for a key
OPEN = _PROBES | _PAGES
"""The paths of routes that need no key."""
LOCAL_ADMIN = Identity(DEFAULT_TENANT, "admin")

Endpoint = Callable[[Request], Awaitable[Response]]


def is_open(path: str) -> bool:
    """Whether a request to this path needs no key."""
    return path in OPEN or path.startswith("/console/")


class Caller:
    """Who made a request. `until_done` holds what must be returned when the request has ended, `until_ready`
    what it needs only until it is ready for the engine. `body_size` is the size of its body in bytes, and
    `turn` its turn at work off the event loop, if it has one."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.body_size = 0
        self.turn: Turn | None = None
        self.until_done = ExitStack()
        self.until_ready = self.until_done.enter_context(ExitStack())

    def ready(self) -> None:
        """The request is ready for the engine: others may be prepared."""
        self.turn = None
        self.until_ready.close()

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self.identity.tenant


class Access:
    """Pure ASGI middleware: puts a `Caller` into the request's state, or refuses the request.

    Without a `store`, or with `insecure` set, no keys are required. `origins` are the web sites whose pages
    may send requests even then; "*" means any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: TenantStore | None,
        usage: "UsageLedger | None" = None,
        meter: Meter,
        insecure: bool = False,
        origins: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._store = None if insecure else store
        self._usage = usage
        self._insecure = insecure
        self._meter = meter
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a known caller, within its limits."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = Caller(LOCAL_ADMIN if is_open(scope["path"]) else self.identify(headers))
        scope.setdefault("state", {})["caller"] = caller
        logs.note(tenant=caller.tenant)
        with caller.until_done:
            if not is_open(scope["path"]):
                reads = scope["method"] in ("GET", "HEAD")  # polling a batch costs nothing
                if not reads:
                    scope["state"]["rate_limits"] = partial(self._meter.headers, caller.identity)
                caller.until_done.enter_context(self._meter.request(caller.identity, reads=reads))
            await self._app(scope, receive, send)

    def identify(self, headers: Headers) -> Identity:
        """Who sends a request with these headers. Raises Unauthorized or Forbidden."""
        if self._store is None or not self._store.has_keys():
            if _from_another_site(headers) and not self._allows(headers):
                # Without keys, any web page that the operator opens could send requests too.
                raise Forbidden(
                    "Requests from other web sites are refused as long as there are no API keys: make keys, "
                    "or name the site with --allowed-origin."
                )
            if not self._insecure and not _names_no_site(headers.get("host", "")):
                # Such a page could also let its own name resolve to this server (DNS rebinding).
                raise Forbidden(
                    "Without API keys the server is asked as localhost or by its IP address only: use one of "
                    "these in the URL, or make keys, or start it with --insecure-no-auth."
                )
            return LOCAL_ADMIN
        key = key_of(headers)
        identity = None if key is None else self._store.identify(key)
        if identity is None:
            raise Unauthorized(
                "A valid API key is needed, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        if self._usage is not None and identity.key is not None:
            self._usage.saw(identity.key)
        return identity

    def _allows(self, headers: Headers) -> bool:
        return "*" in self._origins or headers.get("origin") in self._origins


def key_of(headers: Headers) -> str | None:
    """The key of a request: in OpenAI's header, or in Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def _from_another_site(headers: Headers) -> bool:
    """Whether a browser says that another site's page sends the request. Older browsers and proxies send only
    `Origin`."""
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower()


def _names_no_site(host: str) -> bool:
    """Whether a `Host` is an address or localhost, with any port, or absent: browsers always send one."""
    if not host:
        return True
    try:
        name = urlsplit(f"//{host}").hostname
        return name == "localhost" or bool(ipaddress.ip_address(name or ""))
    except ValueError:
        return False


def caller_of(request: Request) -> Caller:
    """Who made this request."""
    caller: Caller = request.state.caller
    return caller


def admin_only(endpoint: Endpoint) -> Endpoint:
    """The endpoint, for admins' keys. Raises Forbidden for others."""

    @wraps(endpoint)
    async def guarded(request: Request) -> Response:
        if caller_of(request).identity.role != "admin":
            raise Forbidden("This needs an admin's key.")
        return await endpoint(request)

    return guarded
