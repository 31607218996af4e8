"""The tier of other engines: pages that they have in memory, which a request says where to find."""

import logging
import ssl
import time
from collections.abc import Callable, Sequence

import numpy as np

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.staging import StagedTier
from personae.engine.tiers.tier import PageBytes, PageFetch, Tier, TierCounts
from personae.engine.tiers.transfer import PageSource, fetch_pages

LONGEST_FETCH = 5.0  # seconds
RETRY_SECONDS = 5.0  # in which an engine is asked for nothing after a fetch brought nothing

_log = logging.getLogger("personae.kv")


class PeerTier(StagedTier):
    """Implements `Tier` over other engines, and over the tier `below` for all that they do not have.

    A fetch from an engine that is gone, slow or different is counted as an error; what it did not bring is
    looked for in the tier below, and else computed. That an engine has fewer
    pages than it was asked for is no error: it may have evicted them. `tls` is for engines on other machines.
    """

    def __init__(
        self, source: PageSource, below: Tier | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(source.page_bytes)
        self._tls = tls
        self._identity = source.identity
        self._below = below
        self._errors = 0
        self._silent_until: dict[str, float] = {}  # by address
        self._reported: set[str] = set()  # addresses of engines whose first failure was logged

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return 0 if self._below is None else self._below.pages

    @property
    def room(self) -> int:
        """See TierIndex."""
        return 0 if self._below is None else self._below.room

    @property
    def stores(self) -> bool:
        """See TierIndex."""
        return self._below is not None and self._below.stores

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        if source is not None and self._serves(source):
            return True
        return self._below is not None and self._below.has(name)

    def seconds(self, pages: int) -> float | None:
        """See TierIndex."""
        own = super().seconds(pages)
        if self._below is None or own is None:
            return own
        theirs = self._below.seconds(pages)
        return None if theirs is None else max(own, theirs)

    def counts(self) -> TierCounts:
        """See TierIndex."""
        with self._lock:
            errors, self._errors = self._errors, 0
        stored, others = (0, 0) if self._below is None else self._below.counts()
        return TierCounts(stored, errors + others)

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes]
    ) -> None:
        """See Tier."""
        assert self._below is not None, "there is no tier that stores pages"
        self._below.store(keys, owners, ready)

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""
        if self._below is not None:
            self._below.forget(tenant, session)

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if not self._wants(fetch.ticket):
            return 0
        parts: list[PageBytes] = []
        count = 0
        with self._fetch_into(fetch.ticket, len(fetch.keys)) as got:
            if fetch.source is not None and self._serves(fetch.source):
                parts.append(self._from_peer(fetch, fetch.source))
                count = len(parts[0])
            if count < len(fetch.keys) and self._below is not None:
                parts.append(self._from_below(self._below, fetch, count))
                count += len(parts[-1])
            if count:
                got.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return count

    def _from_peer(self, fetch: PageFetch, source: str) -> PageBytes:
        """The first of the pages, as far as another engine has them."""
        path, first = (*fetch.before, *fetch.keys), len(fetch.before)
        seconds = min(fetch.patience, LONGEST_FETCH)
        pages, problem = fetch_pages(source, self._identity, path, first, self.page_bytes, seconds, self._tls)
        if problem:
            with self._lock:
                self._errors += 1
                first_time = source not in self._reported
                self._reported.add(source)
                if not len(pages):  # else it lives, and its pace was measured
                    self._silent_until[source] = time.monotonic() + RETRY_SECONDS
            _log.log(
                logging.WARNING if first_time else logging.DEBUG,
                "another engine gave %d of %d pages, the others are computed: %s",
                len(pages),
                len(fetch.keys),
                problem,
            )
        return pages

    def _from_below(self, below: Tier, fetch: PageFetch, done: int) -> PageBytes:
        """The pages after the first `done`, as far as the tier below has them."""
        path = (*fetch.before, *fetch.keys[:done])
        left = len(fetch.keys) - done
        ticket = below.reserve(left)
        try:
            count = below.fetch(fetch._replace(ticket=ticket, before=path, keys=fetch.keys[done:]))
            return below.take(ticket)[:count] if count else np.empty((0, self.page_bytes), np.uint8)
        finally:
            below.discard(ticket)

    def forget_fetches(self) -> None:
        """See Tier."""
        super().forget_fetches()
        if self._below is not None:
            self._below.forget_fetches()

    def close(self) -> None:
        """See Tier."""
        if self._below is not None:
            self._below.close()

    def _serves(self, source: str) -> bool:
        return self._silent_until.get(source, 0.0) <= time.monotonic()
