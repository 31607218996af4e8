"""Fetched pages in memory, under tickets, until a step copies them into the cache."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from personae.engine.tiers.tier import PageBytes

STAGED_BYTES = 512 * 2**20  # fetched and not yet copied into the cache
_EXPECTED_RATE = 1e9  # bytes a second, while no fetch was measured
_OVERDUE = 8.0  # a fetch that takes so many times as long as expected, and a second, stops further ones


class _Measured(NamedTuple):
    """A fetch that has ended at `at`: it took `seconds` for so many pages."""

    at: float
    pages: int
    seconds: float


class FetchTime:
    """How long fetches take, by the latest ones: seconds = fixed + each * pages.

    A fetch is forgotten after a while. Else one that was slow by chance would be the last: a tier that seems
    slower than computing is not asked, so nothing would show that it is fast again.
    """

    FETCHES, SECONDS = 8, 30.0  # how many are remembered, and for how long

    def __init__(self, page_bytes: int) -> None:
        self._expected = page_bytes / _EXPECTED_RATE
        self._measured: deque[_Measured] = deque(maxlen=self.FETCHES)

    def observe(self, pages: int, seconds: float, now: float) -> None:
        """A fetch of so many pages has ended."""
        self._measured.append(_Measured(now, pages, seconds))

    def of(self, pages: int, now: float) -> float:
        """The expected seconds of such a fetch."""
        while self._measured and self._measured[0].at < now - self.SECONDS:
            self._measured.popleft()
        if not self._measured:
            return pages * self._expected
        each = min(one.seconds / one.pages for one in self._measured)
        return median(one.seconds - each * one.pages for one in self._measured) + each * pages


class StagedTier:
    """The part of a tier that stages pages of `page_bytes`: implements some methods of `Tier`. `_lock` is for
    all that several threads change."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._lock = threading.Lock()
        self._tickets: dict[int, int] = {}  # pages reserved
        self._unfetched: dict[int, int] = {}  # those of them whose fetch has not ended
        self._staged: dict[int, PageBytes] = {}
        self._overdue: dict[int, float] = {}  # by ticket: when its fetch is overdue
        self._next_ticket = 0
        self._times = FetchTime(page_bytes)

    def seconds(self, pages: int) -> float | None:
        """See TierIndex."""
        with self._lock:
            reserved = sum(self._tickets.values())
            if reserved and (reserved + pages) * self.page_bytes > STAGED_BYTES:
                return None
            now = time.monotonic()
            if any(overdue < now for overdue in self._overdue.values()):
                return None
            return self._times.of(sum(self._unfetched.values()) + pages, now)

    def reserve(self, pages: int) -> int:
        """See TierIndex."""
        with self._lock:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._tickets[ticket] = self._unfetched[ticket] = pages
            return ticket

    def discard(self, ticket: int) -> None:
        """See TierIndex."""
        with self._lock:
            self._tickets.pop(ticket, None)
            self._staged.pop(ticket, None)
            if ticket not in self._overdue:  # its fetch has not begun
                self._unfetched.pop(ticket, None)

    def take(self, ticket: int) -> PageBytes:
        """See Tier."""
        with self._lock:
            return self._staged[ticket]

    def forget_fetches(self) -> None:
        """See Tier."""
        with self._lock:
            self._tickets.clear()
            self._staged.clear()
            for ticket in self._unfetched.keys() - self._overdue.keys():
                del self._unfetched[ticket]

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
            self._overdue[ticket] = begun + _OVERDUE * self._times.of(pages, begun) + 1
        got: list[PageBytes] = []
        try:
            yield got
        finally:
            with self._lock:
                del self._overdue[ticket]
                self._unfetched.pop(ticket, None)
                if got:
                    now = time.monotonic()
                    self._times.observe(len(got[0]), now - begun, now)
                    if ticket in self._tickets:
                        self._staged[ticket] = got[0]
