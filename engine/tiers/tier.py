"""A tier keeps pages of the KV cache by their names (`engine/scheduling/page_names.py`).

A step never waits for a tier: `store` returns at once, and a sequence whose pages are being fetched has no
slot. Fetched pages are staged in memory under a ticket until a step copies them into the cache.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from personae.engine.plan import PageKey, PageOwner

PageBytes = NDArray[np.uint8]
"""The content of pages: [pages, bytes of a page]."""


class TierCounts(NamedTuple):
    """What a tier has done since it was last asked: pages stored, and operations that failed."""

    stored: int = 0
    errors: int = 0


class PageFetch(NamedTuple):
    """Pages that a tier is to fetch under a ticket, and after how many seconds they are computed instead.

    `keys` are those of the pages wanted, and `before` those of the pages before them, from the prompt's
    beginning. `source`: see `SequenceLog.pages_at`.
    """

    ticket: int
    before: tuple[PageKey, ...]
    keys: tuple[PageKey, ...]
    patience: float = 5.0
    source: str | None = None


class TierIndex(Protocol):
    """What the scheduler asks a tier. No method waits for anything."""

    @property
    def pages(self) -> int:
        """How many pages it has."""

    @property
    def room(self) -> int:
        """How many pages `store` would take now."""

    @property
    def stores(self) -> bool:
        """Whether it ever takes pages."""

    def has(self, name: bytes, source: str | None = None, /) -> bool:
        """Whether it may have a page of that name, or the engine `source` may. A fetch may still not find it,
        or find it damaged."""

    def wants(self, name: bytes, /) -> bool:
        """Whether `store` would keep a page of that name: it does not know that it has one."""

    def seconds(self, pages: int, /) -> float | None:
        """How long it would take to fetch so many pages, by what earlier fetches took. None: it can fetch
        none now."""

    def reserve(self, pages: int, /) -> int:
        """Reserve memory for the fetch of so many pages. Returns its ticket."""

    def discard(self, ticket: int, /) -> None:
        """Free what was reserved or fetched. Does nothing if that has been done."""

    def counts(self) -> TierCounts:
        """What has happened since the last call."""


class Tier(TierIndex, Protocol):
    """See the module. Several threads use it."""

    @property
    def pending(self) -> int:
        """How many pages were given to `store` and are not counted yet, as stored or failed."""

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes], /
    ) -> None:
        """Keep these pages, each for its owner. Returns at once; `ready` returns their content, and is called
        on another thread. The tier may decide to keep none. It has room for a page by removing one of the
        owner that has the most for its weight."""

    def forget(self, tenant: bytes, session: bytes, /) -> None:
        """Delete the pages of this session (see `PageOwner`) that were given to `store` before. Returns at
        once."""

    def fetch(self, fetch: PageFetch, /) -> int:
        """Stage these pages. Returns how many of them are there, in order; the first that is missing, torn or
        damaged ends it. Blocks: called on a worker thread."""

    def take(self, ticket: int, /) -> PageBytes:
        """The pages that were fetched."""

    def forget_fetches(self) -> None:
        """Discard all tickets: those who hold them are gone."""

    def close(self) -> None:
        """Write what was given to `store`, within a few seconds, and stop."""
