"""The tier of other engines: pages that they have in memory, which a request says where to find."""

import logging
import ssl
import time
from collections.abc import Callable, Sequence

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.staging import StagedTier
from personae.engine.tiers.tier import PageBytes, PageFetch, TierCounts
from personae.engine.tiers.transfer import PageSource, fetch_pages

LONGEST_FETCH = 5.0  # seconds
RETRY_SECONDS = 5.0  # in which an engine is asked for nothing after a fetch brought nothing

_log = logging.getLogger("personae.kv")


class PeerTier(StagedTier):
    """Implements `Tier` over other engines. It stores nothing.

    A fetch from an engine that is gone, slow or different is counted as an error; what it did not bring is
    looked for in the next tier, and else computed. That an engine has fewer pages than it was asked for is no
    error: it may have evicted them. `tls` is for engines on other machines.
    """

    pages = room = pending = 0
    stores = False

    def __init__(self, source: PageSource, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(source.page_bytes)
        self._tls = tls
        self._identity, self._agent = source.identity, source.agent
        self._errors = 0
        self._silent_until: dict[str, float] = {}  # by address
        self._reported: set[str] = set()  # addresses of engines whose first failure was logged

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        return source is not None and self._serves(source)

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return False

    def counts(self) -> TierCounts:
        """See TierIndex."""
        with self._lock:
            errors, self._errors = self._errors, 0
        return TierCounts(0, errors)

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes]
    ) -> None:
        """See Tier."""

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if fetch.source is None or not self._serves(fetch.source) or not self._wants(fetch.ticket):
            return 0
        with self._fetch_into(fetch.ticket, len(fetch.keys)) as got:
            pages = self._from_peer(fetch, fetch.source)
            if len(pages):
                got.append(pages)
        return len(pages)

    def _from_peer(self, fetch: PageFetch, source: str) -> PageBytes:
        """The first of the pages, as far as another engine has them."""
        path, first = (*fetch.before, *fetch.keys), len(fetch.before)
        seconds = min(fetch.patience, LONGEST_FETCH)
        pages, problem = fetch_pages(
            source, self._identity, path, first, self.page_bytes, seconds, self._tls, self._agent
        )
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

    def close(self) -> None:
        """See Tier."""

    def _serves(self, source: str) -> bool:
        return self._silent_until.get(source, 0.0) <= time.monotonic()
