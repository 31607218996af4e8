"""What is known of each session: when it was used, how much, and how long its keys and values are kept."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from personae.api.wire.prompt_cache import LONGEST_NAME, CacheOptions
from personae.engine.scheduling.sessions import SESSIONS_OF_A_TENANT
from personae.errors import NotFound, RequestError

LONGEST_TTL = 30 * 86400
OPENAI_TTL = 1800  # "30m", the only value of `prompt_cache_options.ttl`


class Session(msgspec.Struct, kw_only=True):
    """A session. The times are Unix times in seconds; `ttl` is how many seconds after its last request its
    keys and values are kept. The other numbers are sums over its requests."""

    id: str
    created_at: int
    last_used_at: int
    expires_at: int
    ttl: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    object: str = "session"


class SessionStore:
    """The sessions of all tenants, in memory. A tenant has at most `most`; a further one takes the place of
    the least recently used. `ttl` is the default, in seconds."""

    def __init__(
        self, ttl: int, most: int = SESSIONS_OF_A_TENANT, clock: Callable[[], float] = time.time
    ) -> None:
        self._ttl = ttl
        self._most = most
        self._clock = clock
        self._tenants: dict[str, OrderedDict[str, Session]] = {}

    def ttl_of(self, tenant: str, name: str, options: CacheOptions | None) -> int:
        """How many seconds the next request's keys and values are kept after it."""
        session = self._live(tenant).get(name)
        ttl = self._ttl if session is None else session.ttl
        return ttl if options is None or options.ttl is None else max(ttl, OPENAI_TTL)

    def ended(self, tenant: str, name: str, ttl: int, *, prompt: int, cached: int, completion: int) -> None:
        """Count a request of the session that has ended. Its ttl was `ttl`."""
        if not ttl:
            return
        now, sessions = int(self._clock()), self._tenants.setdefault(tenant, OrderedDict())
        session = sessions.get(name)
        if session is None:
            session = sessions[name] = Session(
                id=name, created_at=now, last_used_at=now, expires_at=now + ttl, ttl=ttl
            )
        sessions.move_to_end(name)
        session.last_used_at, session.ttl, session.expires_at = now, ttl, now + ttl
        session.requests += 1
        session.prompt_tokens += prompt
        session.cached_tokens += cached
        session.completion_tokens += completion
        if len(sessions) > self._most:
            sessions.popitem(last=False)

    def list(self, tenant: str) -> list[Session]:
        """The tenant's sessions, the least recently used first."""
        return [*self._live(tenant).values()]

    def find(self, tenant: str, name: str) -> Session:
        """Raises NotFound."""
        session = self._live(tenant).get(name)
        if session is None:
            raise NotFound("There is no such session, or its time is over.", param="id")
        return session

    def keep(self, tenant: str, name: str, ttl: int) -> Session:
        """Change the session's ttl, and count it from now on. Raises NotFound."""
        session = self.find(tenant, name)
        session.ttl, session.expires_at = ttl, int(self._clock()) + ttl
        return session

    def remove(self, tenant: str, name: str) -> None:
        """Forget the session. Raises NotFound."""
        self.find(tenant, name)
        del self._tenants[tenant][name]

    def _live(self, tenant: str) -> OrderedDict[str, Session]:
        """The tenant's sessions whose time is not over; the others are removed."""
        sessions, now = self._tenants.get(tenant, OrderedDict()), self._clock()
        for name in [name for name, session in sessions.items() if session.expires_at <= now]:
            del sessions[name]
        if not sessions:
            self._tenants.pop(tenant, None)
        return sessions


def checked_name(name: str, param: str) -> str:
    """The name of a session. Raises RequestError if it is too long, or empty."""
    if not 0 < len(name) <= LONGEST_NAME:
        raise RequestError(f"`{param}` must have 1 to {LONGEST_NAME} characters.", param=param)
    return name


def session_key(name: str) -> str:
    """The name as engines know it: short."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
