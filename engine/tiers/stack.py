"""Several tiers as one: what the first does not have is looked for in the next."""

from collections.abc import Callable, Sequence

import numpy as np

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.staging import StagedTier
from personae.engine.tiers.tier import PageBytes, PageFetch, Tier, TierCounts


def stacked(tiers: Sequence[Tier], page_bytes: int) -> Tier | None:
    """These tiers as one; None if there are none."""
    return TierStack(tiers, page_bytes) if len(tiers) > 1 else next(iter(tiers), None)


class TierStack(StagedTier):
    """Implements `Tier` over several, the fastest first. Each that stores pages gets all of them, as far as
    it has room."""

    def __init__(self, tiers: Sequence[Tier], page_bytes: int) -> None:
        super().__init__(page_bytes)
        self._tiers = tiers
        self._parts: dict[int, tuple[Tier, int]] = {}  # by ticket: the tier that fetches, and its ticket

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return sum(tier.pages for tier in self._tiers)

    @property
    def room(self) -> int:
        """See TierIndex."""
        return max(tier.room for tier in self._tiers)

    @property
    def stores(self) -> bool:
        """See TierIndex."""
        return any(tier.stores for tier in self._tiers)

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        return any(tier.has(name, source) for tier in self._tiers)

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return any(tier.wants(name) for tier in self._tiers)

    def seconds(self, pages: int) -> float | None:
        """See TierIndex. Any of them may be asked."""
        longest = super().seconds(pages)
        for tier in self._tiers:
            theirs = tier.seconds(pages)
            longest = None if longest is None or theirs is None else max(longest, theirs)
        return longest

    @property
    def pending(self) -> int:
        """See Tier."""
        return sum(tier.pending for tier in self._tiers)

    def counts(self) -> TierCounts:
        """See TierIndex."""
        return TierCounts(*map(sum, zip(*(tier.counts() for tier in self._tiers), strict=True)))

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes]
    ) -> None:
        """See Tier."""
        for tier in self._tiers:
            if tier.stores and tier.room > 0:  # a slow one does not hold up the others
                tier.store(keys, owners, ready)

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""
        for tier in self._tiers:
            tier.forget(tenant, session)

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        parts: list[PageBytes] = []
        count = 0
        if not self._wants(fetch.ticket):
            return 0
        with self._fetch_into(fetch.ticket, len(fetch.keys)) as got:
            for tier in self._tiers:
                part = self._part(tier, fetch, count)
                if len(part):
                    parts.append(part)
                    count += len(part)
                if count == len(fetch.keys):
                    break
            if parts:
                got.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return count

    def _part(self, tier: Tier, fetch: PageFetch, done: int) -> PageBytes:
        """The pages after the first `done`, as far as this tier has them."""
        before, left = (*fetch.before, *fetch.keys[:done]), fetch.keys[done:]
        none = np.empty((0, self.page_bytes), np.uint8)
        ticket = tier.reserve(len(left))
        try:
            with self._lock:
                self._parts[fetch.ticket] = tier, ticket
            count = tier.fetch(fetch._replace(ticket=ticket, before=before, keys=left))
            return tier.take(ticket)[:count] if count else none
        except KeyError:  # it was discarded meanwhile
            return none
        finally:
            with self._lock:
                self._parts.pop(fetch.ticket, None)
            tier.discard(ticket)

    def discard(self, ticket: int) -> None:
        """See TierIndex. A tier that is fetching for it need not go on."""
        super().discard(ticket)
        with self._lock:
            part = self._parts.get(ticket)
        if part is not None:
            part[0].discard(part[1])

    def forget_fetches(self) -> None:
        """See Tier."""
        super().forget_fetches()
        for tier in self._tiers:
            tier.forget_fetches()

    def close(self) -> None:
        """See Tier."""
        for tier in self._tiers:
            tier.close()
