"""The pages of a tier by their owners: which one makes room for the next."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from personae.engine.plan import PageOwner

Place = TypeVar("Place")


class _OwnedPages:
    """The names of an owner's pages, the least recently used first, and its weight as last stored. `sessions`
    has the names of the pages of each session."""

    __slots__ = ("names", "sessions", "weight")

    def __init__(self) -> None:
        self.names: OrderedDict[bytes, None] = OrderedDict()
        self.sessions: dict[bytes, set[bytes]] = {}
        self.weight = 1.0


class _Page(NamedTuple, Generic[Place]):
    """Where a page is, whose it is, and of which session."""

    place: Place
    owned: _OwnedPages
    session: bytes


class PageIndex(Generic[Place]):
    """Says where each page is. An owner can fill its own share only: `pop` removes a page of the owner that
    has the most pages for its weight, the least recently used one."""

    def __init__(self) -> None:
        self._pages: dict[bytes, _Page[Place]] = {}
        self._owners: dict[bytes, _OwnedPages] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: bytes) -> bool:
        return name in self._pages

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pages)

    def weight(self, tenant: bytes) -> float:
        """The weight of an owner, as last stored."""
        owned = self._owners.get(tenant)
        return 1.0 if owned is None else owned.weight

    def get(self, name: bytes) -> Place | None:
        """Where the page is; None if it is not there."""
        found = self._pages.get(name)
        return None if found is None else found.place

    def add(self, name: bytes, place: Place, owner: PageOwner) -> Place | None:
        """A page of this owner is here, and the most recently used. Returns where it was before."""
        before = self.remove(name)
        owned = self._owners.get(owner.tenant)
        if owned is None:
            owned = self._owners[owner.tenant] = _OwnedPages()
        owned.weight = owner.weight
        owned.names[name] = None
        if owner.session:
            owned.sessions.setdefault(owner.session, set()).add(name)
        self._pages[name] = _Page(place, owned, owner.session)
        return before

    def use(self, name: bytes) -> None:
        """The page is now the most recently used of its owner. Does nothing if it is not there."""
        found = self._pages.get(name)
        if found is not None:
            found.owned.names.move_to_end(name)

    def remove(self, name: bytes) -> Place | None:
        """Remove a page. Returns where it was."""
        found = self._pages.pop(name, None)
        if found is None:
            return None
        owned, session = found.owned, found.session
        del owned.names[name]
        if session:
            owned.sessions[session].remove(name)
            if not owned.sessions[session]:
                del owned.sessions[session]
        return found.place

    def remove_session(self, tenant: bytes, session: bytes) -> list[Place]:
        """Remove the pages of a session. Returns where they were."""
        owned = self._owners.get(tenant)
        names = [] if owned is None else [*owned.sessions.get(session, ())]
        places = [self.remove(name) for name in names]
        return [place for place in places if place is not None]

    def pop(self, wanting: PageOwner) -> Place | None:
        """Remove a page to make room for another one of the owner `wanting`. Returns where it was; None if
        there is none."""
        for tenant in [tenant for tenant, owned in self._owners.items() if not owned.names]:
            del self._owners[tenant]
        loads = {
            tenant: (len(owned.names) + (tenant == wanting.tenant)) / owned.weight
            for tenant, owned in self._owners.items()
        }
        if not loads:
            return None
        most = max(loads, key=loads.__getitem__)
        return self.remove(next(iter(self._owners[most].names)))
