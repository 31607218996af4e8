"""A tier on a disk of which some operations go wrong, as the seed says."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.disk import DiskTier
from personae.engine.tiers.tier import PageBytes, PageFetch

PAGES = 200  # few enough that some are overwritten


class UnreliableTier(DiskTier):
    """Of its operations, `fails` (a share) go wrong. It writes before `store` returns, so that a seed
    repeats."""

    def __init__(self, folder: Path, page_bytes: int, dice: Random, fails: float) -> None:
        super().__init__(folder, PAGES * (page_bytes + 1024), page_bytes, "isolation")
        self._dice, self._fails = dice, fails
        self.scanned.wait()

    @property
    def room(self) -> int:
        """See TierIndex."""
        return 0 if self._strikes() else super().room

    def seconds(self, pages: int) -> float | None:
        """See TierIndex. A time that depends on the machine would not repeat."""
        return None if self._strikes() else 0.0

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes]
    ) -> None:
        """See Tier."""
        if self._strikes():
            return
        super().store(keys, owners, ready)
        while self._queued:
            time.sleep(0.0001)

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if self._strikes():
            fetch = fetch._replace(keys=fetch.keys[: self._dice.randrange(len(fetch.keys))])
        return super().fetch(fetch)

    def _strikes(self) -> bool:
        return self._dice.random() < self._fails
