"""Runs work that would hold up the event loop in threads, for one request of a tenant at a time.

A request with a long body takes a `Turn` when its body is there, and keeps it until it is ready for the
engine. So at most one large request of a tenant is decoded, rendered and encoded at any time, however many it
sends, and tenants take turns. After its turn a tenant rests as long as its work took. So a tenant that sends
nothing else leaves half a processor to the others.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
from anyio import CapacityLimiter, Semaphore, to_thread

from personae.kernels.malloc import give_back_freed

T = TypeVar("T")

_THREADS = 2
_REST = 1.0  # seconds of rest for one of work
_LONGEST_REST = 1.0
_REMEMBERED = 1000  # tenants
_LARGE = 2**19  # bytes of a request whose memory is worth returning to the system
_TRIM_SECONDS = 0.5  # after the last large request


class Workers:
    """The threads, and the order of turns. Belongs to one event loop."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = CapacityLimiter(threads)
        self._lanes: dict[str, _Lane] = {}
        self._trim: threading.Timer | None = None

    async def turn(self, tenant: str, size: int = 0) -> "Turn":
        """Wait for this tenant's turn. `size` is the request's in bytes. The caller must `end` the turn."""
        lane = self._lane(tenant)
        await lane.free.acquire()
        try:
            if (rest := lane.rests_until - anyio.current_time()) > 0:
                await anyio.sleep(rest)
        except BaseException:
            lane.free.release()
            raise
        return Turn(self, lane, size)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` in a turn of its own."""
        turn = await self.turn(tenant)
        try:
            return await turn.run(work)
        finally:
            turn.end()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` as soon as there is a thread. It finishes even if its caller has stopped waiting."""
        return await to_thread.run_sync(work, limiter=self._threads)

    def ended(self, size: int) -> None:
        """A turn for a request of this size has ended: its memory is returned to the system soon."""
        if size >= _LARGE and self._trim is None:
            self._trim = threading.Timer(_TRIM_SECONDS, self._give_back)
            self._trim.daemon = True
            self._trim.start()

    def _give_back(self) -> None:
        self._trim = None
        give_back_freed()

    def _lane(self, tenant: str) -> "_Lane":
        if tenant not in self._lanes and len(self._lanes) >= _REMEMBERED:
            self._lanes = {name: lane for name, lane in self._lanes.items() if lane.used}
        return self._lanes.setdefault(tenant, _Lane())


class _Lane:
    """One tenant's queue, first come, first served."""

    def __init__(self) -> None:
        self.free = Semaphore(1, max_value=1)
        self.rests_until = 0.0

    @property
    def used(self) -> bool:
        return self.free.value == 0 or self.rests_until > anyio.current_time()


class Turn:
    """A tenant's turn at the threads."""

    def __init__(self, workers: Workers, lane: _Lane, size: int) -> None:
        self._workers = workers
        self._lane = lane
        self._size = size
        self._worked = 0.0
        self._ended = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread."""
        return await self._workers.in_thread(partial(self._timed, work))

    def end(self) -> None:
        """Let the tenant's next request have its turn. May be called again."""
        if self._ended:
            return
        self._ended = True
        self._lane.rests_until = anyio.current_time() + min(_REST * self._worked, _LONGEST_REST)
        self._lane.free.release()
        self._workers.ended(self._size)

    def _timed(self, work: Callable[[], T]) -> T:
        begun = time.thread_time()
        try:
            return work()
        finally:
            self._worked += time.thread_time() - begun
