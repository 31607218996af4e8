"""Knows which adapters must be on the device, and brings them there: from disk, from the host.

The executor's pool decides what fits and evicts; this actor keeps the line of those that wait. Those at the
front are read, each in a task of its own, and offered to the pool: a few that take memory until they have a
place, and many whose files are read into it. One that finds no room keeps its place in line and tries again
when another leaves; when many have gone past it, it tries alone. If it has to wait long, the adapter that was
placed first is told to yield, so that those that are always busy cannot starve the others; and if its answers
are long, they have to wait, too.

A queue pins its adapter once, however many requests it holds. What it lets go of stays held on the device
until somebody wants the room: who comes back to it, as most do, is answered at once and does not wait behind
the steps that are in the executor's hands. When there is no room, or sequences want the memory, the half that
was let go of first may leave, then half of what is left.
"""

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

_AT_ONCE = 4  # adapters that are being read, have been and take memory, or wait for room
_ON_THEIR_WAY = 32  # adapters at the front that are looked at, those among them that take no memory
_PAST = 16  # adapters that may be placed before the first in line, when that has found no room
_PATIENCE = 0.5  # seconds that an adapter waits for room before another must yield
_DRAIN = 2.0  # seconds that what runs then has to finish

Waiting = Literal["unread", "read", "in its file", "no room"]


class AdapterStore(Actor[Message]):
    """Answers `Pin` with `Pinned` when the executor has placed the adapter.

    `queue_of` gives the queue to answer to. Adapters come to the front in the order in which they asked.
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
        self._asked: dict[str, tuple[float, str]] = {}  # when, and where the adapter was
        self._reported = self._adapter_stats = AdapterStats()
        self._placed: OrderedDict[str, None] = OrderedDict()  # in the order of their placing
        self._idle: OrderedDict[str, None] = OrderedDict()  # held, but let go of; the longest idle first
        self._wanted = False  # sequences want memory that adapters have
        self._yielding: dict[str, float] = {}  # of them those that were told to, until when they may take
        self._line: OrderedDict[str, Waiting] = OrderedDict()
        self._reread: set[str] = set()  # whose file was damaged, and is made of the upload again
        self._tried: dict[str, int] = {}  # what `_released` was when the pool was asked
        self._loaded = 0  # the pool's count of loads, when it was told last
        self._released = 0  # how often there has been new room
        self._past = 0  # adapters that were placed before the first in line, which had found no room
        self._impatient = False

    async def started(self) -> None:
        """Forget what was meant for an earlier epoch."""
        self.drain()
        self._library.forget_offered()
        self._readers = CapacityLimiter(_AT_ONCE)

    async def receive(self, message: Message) -> None:
        """Handle one message, then see who can go on."""
        match message:
            case Pin(adapter=digest, epoch=self._epoch):
                if digest in self._idle:
                    del self._idle[digest]
                    self._placed[digest] = None
                    self._count_load("device", 0.0)
                if digest in self._placed:
                    self._queue_of(digest).tell(Pinned(digest, self._epoch))
                else:
                    self._line.setdefault(digest, "unread")
                    self._asked.setdefault(digest, (current_time(), "host"))
            case AdapterLoaded(adapter=digest, placed=placed, error=error, kind=kind):
                self._count(message)
                if digest in self._line and not (error is not None and self._reads_again(digest)):
                    self._settle(digest, placed, error, kind)
            case AdaptersEvicted(residents=residents, loads=loads, evictions=evictions):
                self._loaded = loads
                self._adapter_stats = replace(self._adapter_stats, device=residents, evictions=evictions)
            case Unpin(adapter=digest, epoch=self._epoch) if digest in self._placed:
                del self._placed[digest]
                self._idle[digest] = None
                yields = self._yielding.pop(digest, None) is not None
                if yields:
                    self._idle.move_to_end(digest, last=False)
                if yields or self._wanted or "no room" in self._line.values():
                    self._release()
            case MemoryWanted():
                self._wanted = True
                self._release()
        self._advance()
        self._tell_adapter_stats()

    def _count(self, placed: AdapterLoaded) -> None:
        """Keep the figures of what the executor has done."""
        asked = self._asked.get(placed.adapter)
        if placed.placed and asked is not None:
            begun, source = asked
            if placed.loads == self._loaded:
                source = "device"
            self._count_load(source, current_time() - begun)
        self._loaded = max(self._loaded, placed.loads)  # of those that are placed beside steps in any order
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

    def _tell_adapter_stats(self) -> None:
        host, host_bytes = self._library.kept
        self._adapter_stats = replace(
            self._adapter_stats, host=host, host_bytes=host_bytes, line=len(self._line)
        )
        if self._adapter_stats != self._reported:
            self._reported = self._adapter_stats
            self._streamer.tell(self._adapter_stats)

    def _advance(self) -> None:
        """Read, or offer to the pool, those at the front that are not on their way already."""
        left = _AT_ONCE
        for digest in list(islice(self._line, 1 if self._past >= _PAST else _ON_THEIR_WAY)):
            if self._line[digest] == "unread":
                self._begin(digest)
            left -= self._line[digest] != "in its file"
            if not left:
                break

    def _begin(self, digest: str) -> None:
        self._line[digest] = "read"
        source = self._library.find(digest)
        if source is None:
            self._asked[digest] = (self._asked[digest][0], "disk")
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
            self._line[digest] = "in its file"
        self._tried[digest] = self._released
        self._executor.tell(LoadAdapter(digest, source))

    def _reads_again(self, digest: str) -> bool:
        """Whether an adapter that could not be placed from its file is made of the upload once more."""
        if self._line[digest] != "in its file" or digest in self._reread:
            return False
        self._reread.add(digest)
        self._line[digest] = "unread"
        return True

    def _release(self) -> None:
        """The half of the idle that was let go of first may leave; whoever found no room tries again."""
        if not self._idle:
            return
        digests = tuple(islice(self._idle, (len(self._idle) + 1) // 2))
        for digest in digests:
            del self._idle[digest]
        self._executor.tell(Release(digests))
        self._wanted = False
        self._released += 1
        for waiting, state in self._line.items():
            if state == "no room":
                self._line[waiting] = "unread"

    def _settle(self, digest: str, placed: bool, error: str | None, kind: str = "RequestFailed") -> None:
        """Note what became of an adapter in line."""
        tried = self._tried.pop(digest, None)
        first = next(iter(self._line))
        if placed or error is not None:
            if digest == first:
                self._past = 0
            elif self._line[first] == "no room":
                self._past += placed
            del self._line[digest]
            self._reread.discard(digest)
            self._asked.pop(digest, None)
            if placed:
                self._placed[digest] = None
            self._queue_of(digest).tell(Pinned(digest, self._epoch, error, kind))
        elif tried != self._released:
            self._line[digest] = "unread"  # there is new room since the pool was asked
        else:
            self._line[digest] = "no room"
            self._release()
            if self._line[digest] == "no room" and not self._impatient:
                self._impatient = True
                self.start_soon(self._make_room)

    async def _make_room(self) -> None:
        """As long as anyone finds no room: tell one adapter after the other to yield, and those that have had
        their time for it to do so now."""
        while True:
            await sleep(_PATIENCE)
            if "no room" not in self._line.values():
                break
            now = current_time()
            for digest, until in self._yielding.items():
                if now >= until:
                    self._yielding[digest] = math.inf
                    self._queue_of(digest).tell(ReleaseRequest(digest, self._epoch, now=True))
            oldest = next((digest for digest in self._placed if digest not in self._yielding), None)
            if oldest is not None:
                self._yielding[oldest] = now + _DRAIN
                self._adapter_stats = replace(self._adapter_stats, yields=self._adapter_stats.yields + 1)
                self._queue_of(oldest).tell(ReleaseRequest(oldest, self._epoch))
        self._impatient = False
