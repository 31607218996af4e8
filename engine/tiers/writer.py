"""The part of a tier that writes pages on a thread of its own."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.staging import StagedTier
from personae.engine.tiers.tier import PageBytes, TierCounts

QUEUE_BYTES = 64 * 2**20  # that wait to be written
CLOSE_SECONDS = 5.0

_log = logging.getLogger("personae.kv")


class _Storing(NamedTuple):
    """Pages that wait to be written."""

    keys: Sequence[PageKey]
    owners: Sequence[PageOwner]
    ready: Callable[[], PageBytes]


class _Forgetting(NamedTuple):
    """A session whose pages are to be deleted."""

    tenant: bytes
    session: bytes


class WriterTier(StagedTier):
    """Implements more of `Tier`: what `store` and `forget` are given is done in that order, on the thread
    `name`, by `_prepare` (once, at the start), `_write` and `_forget`. Until `_open` is set nothing is taken.
    """

    stores = True

    def __init__(self, page_bytes: int, name: str) -> None:
        super().__init__(page_bytes)
        self._open = False
        self._silent_until = 0.0  # no writes before
        self._queue: queue.SimpleQueue[_Storing | _Forgetting | None] = queue.SimpleQueue()
        self._queued = 0  # pages
        self._stored = self._errors = 0
        self._reported: set[str] = set()
        self._writer = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def room(self) -> int:
        """See TierIndex."""
        if not self._open or time.monotonic() < self._silent_until:
            return 0
        return max(QUEUE_BYTES // self.page_bytes, 1) - self._queued

    @property
    def pending(self) -> int:
        """See Tier."""
        return self._queued

    def counts(self) -> TierCounts:
        """See TierIndex."""
        with self._lock:
            counts = TierCounts(self._stored, self._errors)
            self._stored = self._errors = 0
            return counts

    def store(
        self, keys: Sequence[PageKey], owners: Sequence[PageOwner], ready: Callable[[], PageBytes]
    ) -> None:
        """See Tier."""
        if self._open:
            with self._lock:
                self._queued += len(keys)
            self._queue.put(_Storing(keys, owners, ready))

    def forget(self, tenant: bytes, session: bytes) -> None:
        """See Tier."""
        if self._open:
            self._queue.put(_Forgetting(tenant, session))

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """What the thread does first."""

    def _write(self, key: PageKey, owner: PageOwner, page: PageBytes) -> None:
        """Write a page. Raises OSError: then the pages stored with it are not written."""
        raise NotImplementedError

    def _failed(self, error: OSError) -> None:
        """A write has failed."""
        raise NotImplementedError

    def _forget(self, tenant: bytes, session: bytes) -> None:
        """Delete the pages of a session."""
        raise NotImplementedError

    def _run(self) -> None:
        self._prepare()
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Forgetting):
                self._forget(*item)
                continue
            try:
                if time.monotonic() >= self._silent_until:
                    for key, owner, page in zip(item.keys, item.owners, item.ready(), strict=True):
                        if self.wants(key.name):
                            self._write(key, owner, page)
            except OSError as error:
                self._failed(error)
            finally:
                with self._lock:
                    self._queued -= len(item.keys)

    def _finish(self) -> bool:
        """Do what is left, within a few seconds. Returns whether the thread has ended."""
        self._open = False
        self._queue.put(None)
        self._writer.join(CLOSE_SECONDS)
        return not self._writer.is_alive()

    def _report(self, sentence: str) -> None:
        """Count a failure, and log it the first time."""
        with self._lock:
            self._errors += 1
        if sentence not in self._reported:
            self._reported.add(sentence)
            _log.warning("%s", sentence)
