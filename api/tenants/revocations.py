"""Ends what runs for a key or a tenant that is revoked meanwhile.

A key may be revoked by a request, by a command in another process, or through another server with the same
database. So what runs is compared with what is stored twice a second, and at once after a request.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from personae.actors.kit.background import background_tasks, repeat
from personae.api.tenants.store import Identity, TenantStore
from personae.errors import Unauthorized

CHECK_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class Watched:
    """Something that runs for `who`, which `end` ends."""

    who: Identity
    end: Callable[[], None]
    revoked: bool = False

    def error(self) -> Unauthorized:
        """The error for its client once it was `revoked`."""
        what = "tenant" if self.who.key is None else "API key"
        return Unauthorized(f"The {what} was revoked while the request ran.")


class Revocations:
    """Watches what runs. Without a `store` nobody is ever revoked."""

    def __init__(self, store: TenantStore | None = None) -> None:
        self._store = store
        self._watched: defaultdict[tuple[str, str | None], set[Watched]] = defaultdict(set)

    @contextmanager
    def watching(self, who: Identity, end: Callable[[], None]) -> Iterator[Watched]:
        """Call `end`, once, if the key or the tenant is revoked while the block runs. An admin without a
        stored key cannot be revoked."""
        watched, of = Watched(who, end), (who.tenant, who.key)
        if who.key is None and who.role == "admin":
            yield watched
            return
        self._watched[of].add(watched)
        try:
            yield watched
        finally:
            self._watched[of].discard(watched)
            if not self._watched[of]:
                del self._watched[of]

    def check(self) -> None:
        """End what runs for those who are revoked now. Raises StorageFailed."""
        if self._store is None or not self._watched:
            return
        for of in self._revoked(self._store, self._watched.keys()):
            for watched in tuple(self._watched.get(of, ())):
                if not watched.revoked:
                    watched.revoked = True
                    watched.end()

    def _revoked(
        self, store: TenantStore, running: Collection[tuple[str, str | None]]
    ) -> list[tuple[str, str | None]]:
        keys = store.valid_keys([key for _, key in running if key is not None])
        tenants = {name for name, key in running if key is None and store.on_behalf_of(name) is not None}
        return [
            (name, key) for name, key in running if (name not in tenants if key is None else key not in keys)
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check regularly while the block runs."""
        async with background_tasks() as tasks:
            tasks.start_soon(repeat, CHECK_SECONDS, self.check, "it is not known which keys were revoked")
            yield
