"""Runs work that would hold up the event loop in threads, for one request of a tenant at a time.

A request with a long body takes a `Turn` when its body is there, and keeps it until it is ready for the
engine. So at most one large request of a tenant is decoded, rendered and encoded at any time, however many it
sends, and tenants take turns. After its turn a tenant rests as long as its work took. So a tenant that sends
nothing else leaves half a processor to the others.

Short requests are prepared on the event loop itself. While several tenants send requests, one that would take
more than a third of the loop's time for them waits before each, up to a second. A client that leaves
meanwhile has cost next to nothing.
"""

import math
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
_LOOP_SHARE = 1 / 3  # of the event loop's time, for a tenant's short requests
_BURST = 0.05  # seconds of the loop's time that a tenant may take at once
_LONGEST_WAIT = 1.0
_RECENT = 2.0  # seconds for which a tenant counts as sending requests
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

    def reserve_loop(self, tenant: str) -> float:
        """Reserve the event loop's time for another short request of this tenant. Returns the seconds that
        the request has to wait."""
        lane, now = self._lane(tenant), anyio.current_time()
        lane.seen = now
        waiting = max(lane.loop_until - now, 0.0)
        lane.loop_until = now + waiting + lane.cost / _LOOP_SHARE
        others = (other.seen for other in self._lanes.values() if other is not lane)
        if waiting <= _BURST or not any(seen > now - _RECENT for seen in others):
            return 0.0
        return min(waiting - _BURST, _LONGEST_WAIT)

    def release_loop(self, tenant: str) -> None:
        """A request that had a reservation is not prepared."""
        lane = self._lane(tenant)
        lane.loop_until -= lane.cost / _LOOP_SHARE

    def on_loop(self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work`, which is a part of preparing a short request, and remember what it takes."""
        begun = time.perf_counter()
        try:
            return work()
        finally:
            lane = self._lane(tenant)
            lane.cost += (time.perf_counter() - begun - lane.cost) / 8

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
        self.loop_until = 0.0  # when the loop's time for its short requests will be over, at its share
        self.cost = 0.0  # seconds of the loop for one of them, as it was lately
        self.seen = -math.inf  # when it last sent one

    @property
    def used(self) -> bool:
        now = anyio.current_time()
        return self.free.value == 0 or max(self.rests_until, self.loop_until, self.seen + _RECENT) > now


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
