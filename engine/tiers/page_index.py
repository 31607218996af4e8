"""The pages of a tier by their owners: which one makes room for the next."""

from collections import OrderedDict
from typing import Generic, TypeVar

from personae.engine.plan import PageOwner

Place = TypeVar("Place")


class _OwnedPages:
    """The names of an owner's pages, the least recently used first, and its weight as last stored."""

    __slots__ = ("names", "weight")

    def __init__(self) -> None:
        self.names: OrderedDict[bytes, None] = OrderedDict()
        self.weight = 1.0


class PageIndex(Generic[Place]):
    """Says where each page is. An owner can fill its own share only: `pop` removes a page of the owner that
    has the most pages for its weight, the least recently used one."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[Place, _OwnedPages]] = {}
        self._owners: dict[bytes, _OwnedPages] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def get(self, name: bytes) -> Place | None:
        """Where the page is; None if it is not there."""
        found = self._places.get(name)
        return None if found is None else found[0]

    def add(self, name: bytes, place: Place, owner: PageOwner) -> Place | None:
        """A page of this owner is here, and the most recently used. Returns where it was before."""
        before = self.remove(name)
        owned = self._owners.get(owner.tenant)
        if owned is None:
            owned = self._owners[owner.tenant] = _OwnedPages()
        owned.weight = owner.weight
        owned.names[name] = None
        self._places[name] = place, owned
        return before

    def use(self, name: bytes) -> None:
        """The page is now the most recently used of its owner. Does nothing if it is not there."""
        found = self._places.get(name)
        if found is not None:
            found[1].names.move_to_end(name)

    def remove(self, name: bytes) -> Place | None:
        """Remove a page. Returns where it was."""
        found = self._places.pop(name, None)
        if found is None:
            return None
        del found[1].names[name]
        return found[0]

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
