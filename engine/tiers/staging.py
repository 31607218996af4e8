"""Fetched pages in memory, under tickets, until a step copies them into the cache."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from personae.engine.tiers.tier import PageBytes

STAGED_BYTES = 512 * 2**20  # fetched and not yet copied into the cache
_EXPECTED_RATE = 1e9  # bytes a second, until a fetch was measured
_OVERDUE = 8.0  # a fetch that takes so many times as long as expected, and a second, stops further ones


class StagedTier:
    """The part of a tier that stages pages of `page_bytes`: implements some methods of `Tier`. `_lock` is for
    all that several threads change."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._lock = threading.Lock()
        self._tickets: dict[int, int] = {}  # pages reserved
        self._staged: dict[int, PageBytes] = {}
        self._overdue: dict[int, tuple[float, int]] = {}  # by ticket: when its fetch is overdue, its pages
        self._next_ticket = 0
        self._page_seconds = page_bytes / _EXPECTED_RATE

    def seconds(self, pages: int) -> float | None:
        """See TierIndex."""
        with self._lock:
            reserved = sum(self._tickets.values())
            if reserved and (reserved + pages) * self.page_bytes > STAGED_BYTES:
                return None
            now = time.monotonic()
            if any(overdue < now for overdue, _ in self._overdue.values()):
                return None
            before = sum(count for _, count in self._overdue.values())
            return (before + pages) * self._page_seconds

    def reserve(self, pages: int) -> int:
        """See TierIndex."""
        with self._lock:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._tickets[ticket] = pages
            return ticket

    def discard(self, ticket: int) -> None:
        """See TierIndex."""
        with self._lock:
            self._tickets.pop(ticket, None)
            self._staged.pop(ticket, None)

    def take(self, ticket: int) -> PageBytes:
        """See Tier."""
        with self._lock:
            return self._staged[ticket]

    def forget_fetches(self) -> None:
        """See Tier."""
        with self._lock:
            self._tickets.clear()
            self._staged.clear()

    def _wants(self, ticket: int) -> bool:
        """Whether the ticket has not been discarded."""
        with self._lock:
            return ticket in self._tickets

    @contextmanager
    def _fetch_into(self, ticket: int, pages: int) -> Iterator[list[PageBytes]]:
        """Measure the fetch of so many pages inside the block, which puts the pages that it got into the
        list. They are staged if the ticket was not discarded meanwhile."""
        begun = time.monotonic()
        with self._lock:
            self._overdue[ticket] = (begun + _OVERDUE * pages * self._page_seconds + 1, pages)
        got: list[PageBytes] = []
        try:
            yield got
        finally:
            with self._lock:
                del self._overdue[ticket]
                if got:
                    took = (time.monotonic() - begun) / len(got[0])
                    self._page_seconds += (took - self._page_seconds) / 4
                    if ticket in self._tickets:
                        self._staged[ticket] = got[0]
