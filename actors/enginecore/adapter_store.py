"""Knows which adapters must be on the device, and loads them: from disk, from the host.

The executor's pool decides what fits, and evicts. This actor keeps the queue of adapters that wait. Those at
the front are read, each in a task of its own, and offered to the pool: a few that use host memory until they
are loaded, and many whose files are read straight into the pool. An adapter that finds no room keeps its
place in the queue and tries again when another is released. After many others have overtaken it, it tries
alone. If it waits long, the adapter that was loaded first is asked to release its memory, so that busy
adapters cannot starve the others. If its answers are long, they are preempted.

A queue pins its adapter once, however many requests it holds. An adapter that its queue has unpinned stays
held on the device until somebody needs the room. So a queue that comes back to its adapter, as most do, is
answered at once and does not wait behind the steps that the executor has. When there is no room, or sequences
need the memory, the half that was unpinned first may be evicted, then half of what is left.

Adapters that are kept loaded are loaded without a queue, and others do not get their memory. The frontend
bounds them, so that all other adapters still fit one after the other.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Literal

from anyio import CapacityLimiter, current_time, sleep
from msgspec.structs import replace

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    AdapterLoaded,
    AdaptersEvicted,
    AdapterStats,
    KeepLoaded,
    LoadAdapter,
    MemoryWanted,
    Message,
    Pin,
    Pinned,
    Release,
    ReleaseRequest,
    Unpin,
)
from personae.actors.spec import AdapterProvider
from personae.errors import AdapterError
from personae.lora.source import AdapterSource

_MAX_READS = 4  # adapters that are being read, use host memory until they are loaded, or wait for room
_MAX_OFFERS = 32  # adapters at the front of the queue that may be in progress at once
_MAX_OVERTAKING = 16  # adapters that may overtake the first in the queue while that finds no room
_WAIT_SECONDS = 0.5  # how long an adapter waits for room before another is asked to release its own
_DRAIN_SECONDS = 2.0  # how long the running sequences of that adapter may then take

log = logging.getLogger("personae.engine")

Waiting = Literal["unread", "read", "in its file", "no room"]


class AdapterStore(Actor[Message]):
    """Answers `Pin` with `Pinned` when the executor has loaded the adapter.

    `queue_of` returns the queue to answer to. Adapters are loaded in the order in which they were pinned.
    """

    def __init__(
        self,
        library: AdapterProvider,
        epoch: int,
        executor: Ref[Message],
        queue_of: Callable[[str | None], Ref[Message]],
        streamer: Ref[Message],
    ) -> None:
        self._library = library
        self._epoch = epoch
        self._executor = executor
        self._queue_of = queue_of
        self._streamer = streamer
        self._requested: dict[str, tuple[float, str]] = {}  # when, and where the adapter was
        self._reported = self._adapter_stats = AdapterStats()
        self._placed: OrderedDict[str, None] = OrderedDict()  # pinned, in the order of loading
        self._idle: OrderedDict[str, None] = OrderedDict()  # unpinned but held; the longest idle first
        self._kept_loaded: frozenset[str] = frozenset()  # neither released nor asked to release
        self._memory_wanted = False  # sequences need memory that adapters have
        self._releasing: dict[str, float] = {}  # placed, asked to release; the time when that must be done
        self._queue: OrderedDict[str, Waiting] = OrderedDict()
        self._reread: set[str] = set()  # whose file was damaged; it is made again from the upload
        self._tried: dict[str, int] = {}  # what `_released` was when the pool was asked
        self._loaded = 0  # the pool's count of loads, as last reported
        self._released = 0  # how often new room was made
        self._overtaken = 0  # adapters loaded before the first in the queue, which found no room
        self._making_room = False

    async def started(self) -> None:
        """Drop messages of an earlier epoch."""
        self.drain()
        self._library.forget_offered()
        self._readers = CapacityLimiter(_MAX_READS)

    async def receive(self, message: Message) -> None:
        """Handle one message, then start what can go on."""
        match message:
            case Pin(adapter=digest, epoch=self._epoch):
                if digest in self._idle:
                    del self._idle[digest]
                    self._placed[digest] = None
                    self._count_load("device", 0.0)
                if digest in self._placed:
                    self._queue_of(digest).tell(Pinned(digest, self._epoch))
                else:
                    self._queue.setdefault(digest, "unread")
                    self._requested.setdefault(digest, (current_time(), "host"))
            case AdapterLoaded(adapter=digest, placed=placed, error=error, kind=kind):
                self._count(message)
                if digest in self._queue and not (error is not None and self._reads_again(digest)):
                    self._settle(digest, placed, error, kind)
            case AdaptersEvicted(residents=residents, loads=loads, evictions=evictions):
                self._loaded = loads
                self._adapter_stats = replace(self._adapter_stats, device=residents, evictions=evictions)
            case Unpin(adapter=digest, epoch=self._epoch) if digest in self._placed:
                del self._placed[digest]
                self._idle[digest] = None
                was_releasing = self._releasing.pop(digest, None) is not None
                if was_releasing:
                    self._idle.move_to_end(digest, last=False)
                if was_releasing or self._memory_wanted or "no room" in self._queue.values():
                    self._release()
            case KeepLoaded(adapters=digests):
                self._keep_loaded(frozenset(digests))
            case MemoryWanted():
                self._memory_wanted = True
                self._release()
        self._advance()
        self._report_stats()

    def _keep_loaded(self, digests: frozenset[str]) -> None:
        """Load these adapters, and keep them. All others may be released again."""
        self._kept_loaded = digests
        for digest in sorted(digests):
            if digest not in self._placed and digest not in self._idle:
                self._queue.setdefault(digest, "unread")
        if self._memory_wanted or "no room" in self._queue.values():
            self._release()

    def _count(self, placed: AdapterLoaded) -> None:
        """Update the statistics with the executor's answer."""
        asked = self._requested.get(placed.adapter)
        if placed.placed and asked is not None:
            begun, source = asked
            if placed.loads == self._loaded:
                source = "device"
            self._count_load(source, current_time() - begun)
        self._loaded = max(self._loaded, placed.loads)  # concurrent loads may finish in any order
        self._adapter_stats = replace(
            self._adapter_stats, device=placed.residents, evictions=placed.evictions
        )

    def _count_load(self, source: str, seconds: float) -> None:
        loads, spent = self._adapter_stats.loads, self._adapter_stats.load_seconds
        self._adapter_stats = replace(
            self._adapter_stats,
            loads={**loads, source: loads.get(source, 0) + 1},
            load_seconds={**spent, source: spent.get(source, 0.0) + seconds},
        )

    def _report_stats(self) -> None:
        host, host_bytes = self._library.kept
        kept = sum(digest in self._placed or digest in self._idle for digest in self._kept_loaded)
        self._adapter_stats = replace(
            self._adapter_stats, kept_loaded=kept, host=host, host_bytes=host_bytes, line=len(self._queue)
        )
        if self._adapter_stats != self._reported:
            self._reported = self._adapter_stats
            self._streamer.tell(self._adapter_stats)

    def _advance(self) -> None:
        """Read or offer the adapters at the front of the queue that are not in progress yet."""
        left = _MAX_READS
        for digest in list(islice(self._queue, 1 if self._overtaken >= _MAX_OVERTAKING else _MAX_OFFERS)):
            if self._queue[digest] == "unread":
                self._begin(digest)
            left -= self._queue[digest] != "in its file"
            if not left:
                break

    def _begin(self, digest: str) -> None:
        self._queue[digest] = "read"
        source = self._library.find(digest)
        if source is None:
            if digest in self._requested:
                self._requested[digest] = (self._requested[digest][0], "disk")
            self.start_soon(self._read, digest)
        else:
            self._offer(digest, source)

    async def _read(self, digest: str) -> None:
        try:
            source = await self.in_thread(self._library.read, digest, limiter=self._readers)
        except AdapterError as error:
            self._settle(digest, False, error.message)
        else:
            self._offer(digest, source)
        self._advance()

    def _offer(self, digest: str, source: AdapterSource) -> None:
        if source.stored:
            self._queue[digest] = "in its file"
        self._tried[digest] = self._released
        self._executor.tell(LoadAdapter(digest, source))

    def _reads_again(self, digest: str) -> bool:
        """Whether to make an adapter's file again from the upload, once, after it could not be loaded from
        its file."""
        if self._queue[digest] != "in its file" or digest in self._reread:
            return False
        self._reread.add(digest)
        self._queue[digest] = "unread"
        return True

    def _release(self) -> None:
        """Allow the half that was unpinned first to be evicted. Adapters that found no room try again."""
        idle = [digest for digest in self._idle if digest not in self._kept_loaded]
        if not idle:
            return
        digests = tuple(idle[: (len(idle) + 1) // 2])
        for digest in digests:
            del self._idle[digest]
        self._executor.tell(Release(digests))
        self._memory_wanted = False
        self._released += 1
        for waiting, state in self._queue.items():
            if state == "no room":
                self._queue[waiting] = "unread"

    def _settle(self, digest: str, placed: bool, error: str | None, kind: str = "RequestFailed") -> None:
        """Handle the outcome of loading an adapter of the queue."""
        tried = self._tried.pop(digest, None)
        first = next(iter(self._queue))
        if placed or error is not None:
            if digest == first:
                self._overtaken = 0
            elif self._queue[first] == "no room":
                self._overtaken += placed
            del self._queue[digest]
            self._reread.discard(digest)
            asked = self._requested.pop(digest, None) is not None
            if placed:
                (self._placed if asked else self._idle)[digest] = None
                if not self._adapter_stats.evictions:
                    self.start_soon(self._let_go, digest)
            if asked:
                self._queue_of(digest).tell(Pinned(digest, self._epoch, error, kind))
            elif error is not None:
                log.warning("adapter %s cannot be kept loaded: %s", digest[:12], error)
        elif tried != self._released:
            self._queue[digest] = "unread"  # new room was made after the pool was asked
        else:
            self._queue[digest] = "no room"
            self._release()
            if self._queue[digest] == "no room" and not self._making_room:
                self._making_room = True
                self.start_soon(self._make_room)

    async def _let_go(self, digest: str) -> None:
        await self.in_thread(self._library.placed, digest, limiter=self._readers)

    async def _make_room(self) -> None:
        """While any adapter finds no room: ask one adapter after the other to release its memory, and preempt
        those whose time for it is over."""
        while True:
            await sleep(_WAIT_SECONDS)
            if "no room" not in self._queue.values():
                break
            now = current_time()
            for digest, until in self._releasing.items():
                if now >= until:
                    self._releasing[digest] = math.inf
                    self._queue_of(digest).tell(ReleaseRequest(digest, self._epoch, now=True))
            busy = self._releasing.keys() | self._kept_loaded
            oldest = next((digest for digest in self._placed if digest not in busy), None)
            if oldest is not None:
                self._releasing[oldest] = now + _DRAIN_SECONDS
                self._adapter_stats = replace(self._adapter_stats, yields=self._adapter_stats.yields + 1)
                self._queue_of(oldest).tell(ReleaseRequest(oldest, self._epoch))
        self._making_room = False
