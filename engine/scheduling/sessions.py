"""The sessions whose pages the prefix cache keeps: for a time after each turn, within their tenant's share.

A session is a conversation that its client has named. Its next turn begins with the tokens of the last one.
So the pages of that turn go last among the pages that the tenant loses, until the session's time is over.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from personae.engine.scheduling.prefix import CacheHandle, KeptPath, PageNode, PrefixCache

SESSIONS_OF_A_TENANT = 1024  # a further one takes the place of the least recently used


class _Session:
    """What a session keeps in which cache, until when."""

    __slots__ = ("cache", "path", "until")

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.path = KeptPath()
        self.until = 0.0


class SessionTable:
    """The sessions of all tenants. `now` is in seconds, on any clock that only goes forward."""

    __slots__ = ("_due", "_tenants", "now")

    def __init__(self) -> None:
        self._tenants: dict[str, OrderedDict[str, _Session]] = {}  # the least recently used first
        self._due = math.inf  # no session's time is over before
        self.now = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def keep(self, tenant: str, name: str, cache: PrefixCache, handle: CacheHandle, seconds: float) -> None:
        """A turn of the session ends: what the handle holds in the cache is kept for so long, and what the
        session kept before is not."""
        sessions = self._tenants.setdefault(tenant, OrderedDict())
        session = sessions.setdefault(name, _Session(cache))
        sessions.move_to_end(name)
        if session.cache is not cache:
            session.cache.unkeep(session.path)
            session.cache = cache
        cache.keep(session.path, handle)
        self._extend(session, seconds)
        if len(sessions) > SESSIONS_OF_A_TENANT:
            self._end(tenant, next(iter(sessions)))

    def extend(self, tenant: str, name: str, seconds: float) -> None:
        """Keep what the session keeps for so long from now on; 0: no longer. Does nothing if it keeps
        nothing."""
        if name not in self._tenants.get(tenant, ()):
            return
        if seconds > 0:
            self._extend(self._tenants[tenant][name], seconds)
        else:
            self._end(tenant, name)

    def forget(self, tenant: str, name: str) -> Sequence[PageNode]:
        """End the session now, and remove its pages from the cache. Returns the pages that are still in
        use, the last one first."""
        if name not in self._tenants.get(tenant, ()):
            return ()
        session = self._tenants[tenant][name]
        kept = session.path.nodes()
        self._end(tenant, name)
        return session.cache.drop_unused(kept)

    def _extend(self, session: _Session, seconds: float) -> None:
        session.until = self.now + seconds
        self._due = min(self._due, session.until)

    def tick(self, now: float) -> None:
        """It is `now`: end the sessions whose time is over."""
        self.now = now
        if now < self._due:
            return
        over = [
            (tenant, name)
            for tenant, sessions in self._tenants.items()
            for name, session in sessions.items()
            if session.until <= now
        ]
        for tenant, name in over:
            self._end(tenant, name)
        left = (session.until for sessions in self._tenants.values() for session in sessions.values())
        self._due = min(left, default=math.inf)

    def _end(self, tenant: str, name: str) -> None:
        sessions = self._tenants[tenant]
        session = sessions.pop(name)
        session.cache.unkeep(session.path)
        if not sessions:
            del self._tenants[tenant]
