"""Writes the changes of many requests in one transaction, and tells each when its own is on disk.

Waiting for the disk takes milliseconds, and a change microseconds. So the changes that arrive during one
transaction wait, and form the next one. A change that fails takes no other with it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from anyio import CancelScope, CapacityLimiter, Lock, to_thread

from personae.api.database.base import Connection
from personae.errors import StorageFailed

if TYPE_CHECKING:
    from personae.api.tenants.data import DataDir

logger = logging.getLogger(__name__)

Change = Callable[[Connection], object]

_MOST = 256  # changes of one transaction


class _Waiting:
    """A change, and what became of it."""

    __slots__ = ("change", "done", "failure")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.done = False
        self.failure: Exception | None = None


class GroupCommit:
    """Writes to `data`; `what` names it in logs and metrics. For one event loop."""

    def __init__(self, data: "DataDir", what: str) -> None:
        self._data = data
        self._what = what
        self._waiting: list[_Waiting] = []
        self._turn: Lock | None = None

    async def write(self, change: Change) -> None:
        """Make a change, which may be called twice. It is on disk when this returns, also if the caller is
        cancelled meanwhile. Raises StorageFailed, or what the change raises; then nothing of it is stored.
        """
        mine = _Waiting(change)
        self._waiting.append(mine)
        with CancelScope(shield=True):  # of a change that may be stored already, the caller has to know
            if self._turn is None:
                self._turn, self._threads = Lock(), CapacityLimiter(1)
            async with self._turn:
                while not mine.done:
                    together, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                    await to_thread.run_sync(self._write, together, limiter=self._threads)
        if mine.failure is not None:
            self._data.failures.add(self._what)
            logger.error("%s could not be written: %s", self._what, mine.failure)
            raise mine.failure

    def _write(self, together: Sequence[_Waiting]) -> None:
        """Write all in one transaction; if one of them fails, each in its own."""
        try:
            with self._data.write() as db:
                for each in together:
                    each.change(db)
        except StorageFailed as error:
            for each in together:
                each.failure = StorageFailed(error.message, retry_after=error.retry_after)
        except Exception as error:
            if len(together) == 1:
                together[0].failure = error
            else:
                for each in together:
                    self._write([each])
        for each in together:
            each.done = True
