"""Host memory, a disk and an object store as tiers, of whose operations some go wrong, as the seed says."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch

from personae.engine.object_stores import AsyncObjects
from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.disk import DiskTier
from personae.engine.tiers.host_memory import HostTier
from personae.engine.tiers.remote import RemoteTier
from personae.engine.tiers.stack import TierStack
from personae.engine.tiers.tier import PageBytes, PageFetch

IN_MEMORY, ON_DISK = 30, 100  # pages: few enough that some are overwritten, and are found behind that


class UnreliableTier(TierStack):
    """Of its operations, `fails` (a share) go wrong. It writes before `store` returns, so that a seed
    repeats."""

    def __init__(self, folder: Path, page_bytes: int, dice: Random, fails: float) -> None:
        objects = AsyncObjects(f"file://{folder / 'objects'}")
        self._disk = DiskTier(folder, ON_DISK * (page_bytes + 1024), page_bytes, "isolation")
        self._remote = RemoteTier(objects, 2**40, page_bytes, "isolation")
        self._host = HostTier(IN_MEMORY * page_bytes, page_bytes, torch.device("cpu"))
        super().__init__([self._host, self._disk, self._remote], page_bytes)
        self._dice, self._fails = dice, fails
        self._disk.scanned.wait()
        self._remote.listed.wait()

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
        while self._host._queued or self._disk._queued or self._remote._queued:
            time.sleep(0.0001)

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if self._strikes():
            fetch = fetch._replace(keys=fetch.keys[: self._dice.randrange(len(fetch.keys))])
        return super().fetch(fetch) if fetch.keys else 0

    def _strikes(self) -> bool:
        return self._dice.random() < self._fails
