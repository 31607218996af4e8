"""Queues the requests of one adapter: pins the adapter, then offers a few requests at a time to the
scheduler.

A burst for one adapter waits here, not in the engine core. The scheduler sees the head of every queue at
once. So its fairness policy can always choose between adapters, and a cold adapter delays only its own
requests. Within a queue each tenant has one lane for normal sequences and one for background sequences, so
the policy can also choose between tenants and between urgent and background work. Within a lane a higher
priority goes first, as in the scheduler.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    Cancel,
    Enqueue,
    Message,
    Pin,
    Pinned,
    Preempt,
    Progress,
    Refused,
    ReleaseRequest,
    Submit,
    Unpin,
)
from personae.engine.scheduling.live import turn
from personae.engine.sequence import SequenceLog


class Lane:
    """The sequences of one tenant and kind (normal or background). `waiting` are in this queue. The
    scheduler has the `offered` ones, but has not started them."""

    __slots__ = ("_arrivals", "_heap", "offered", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, SequenceLog] = {}
        self.offered: set[str] = set()
        self._heap: list[tuple[int, int, str]] = []  # may hold entries of sequences that have left
        self._arrivals = 0

    def add(self, log: SequenceLog) -> None:
        """Queue a sequence. One that has emitted tokens goes before sequences without tokens."""
        self.waiting[log.id] = log
        order = 0 if len(log.tokens) > log.prompt_length else self._arrivals
        heappush(self._heap, (turn(log, order), self._arrivals, log.id))
        self._arrivals += 1

    def take(self, count: int) -> list[SequenceLog]:
        """Remove and return up to `count` waiting sequences, by priority, then by arrival."""
        taken: list[SequenceLog] = []
        while len(taken) < count and self.waiting:
            log = self.waiting.pop(heappop(self._heap)[2], None)
            if log is not None:
                taken.append(log)
        return taken


class AdapterQueue(Actor[Message]):
    """The queue of one adapter, or of the base model (`adapter` is None), which needs no pin.

    `window` is how many normal sequences of one tenant may wait in the scheduler; the queue keeps the rest.
    Background sequences get an eighth of it. The queue calls `on_idle` when it has nothing left to do; it can
    then end without losing anything.
    """

    def __init__(
        self,
        adapter: str | None,
        store: Ref[Message],
        scheduler: Ref[Message],
        streamer: Ref[Message],
        window: int,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self._adapter = adapter
        self._store = store
        self._scheduler = scheduler
        self._streamer = streamer
        self._window = window
        # Small: a running sequence keeps its adapter on the device, and background ones may run for long.
        self._background_window = max(window // 8, 1)
        self._on_idle = on_idle
        # By (tenant, background). Empty lanes are dropped.
        self._lanes: dict[tuple[str, bool], Lane] = {}
        self._on_device: set[str] = set()  # submitted to the scheduler, not ended yet
        self._refused: set[str] = set()  # ended by this queue; the ingress has not confirmed it yet
        self._epoch = 0
        self._pinned = adapter is None
        self._pinning = self._releasing = False

    async def receive(self, message: Message) -> None:
        """Handle one message, then offer sequences and update the pin."""
        match message:
            case Enqueue(logs=logs, epoch=epoch):
                if epoch != self._epoch:
                    self._begin(epoch)
                for log in logs:
                    if log.id not in self._refused:
                        self._lanes.setdefault((log.tenant, log.background), Lane()).add(log)
            case Pinned(error=error, kind=kind, epoch=self._epoch):
                self._pinning = False
                if error is None:
                    self._pinned = True
                else:
                    refused = tuple(id for lane in self._lanes.values() for id in lane.waiting)
                    self._lanes.clear()  # none was offered: that needs a pin
                    self._refuse(refused, kind, error)
            case ReleaseRequest(now=now, epoch=self._epoch):
                self._releasing = self._pinned
                if now and self._pinned and self._on_device:
                    self._scheduler.tell(Preempt(tuple(self._on_device), self._epoch))
            case Progress(started=started, ended=ended):
                self._on_device.difference_update(ended)
                self._refused.difference_update(ended)
                for lane in self._lanes.values():
                    lane.offered.difference_update(started, ended)
                    for id in ended:
                        lane.waiting.pop(id, None)
            case Cancel(ids=ids):
                self._cancel(ids)
        self._move()
        busy = self._lanes or self._on_device or self._refused or self._pinning
        if self._on_idle is not None and not busy and not self.pending:
            self._on_idle()

    def _move(self) -> None:
        """Offer what the windows allow. Take the adapter's pin, or give it back."""
        self._lanes = {name: lane for name, lane in self._lanes.items() if lane.waiting or lane.offered}
        waiting = any(lane.waiting for lane in self._lanes.values())
        if self._adapter is not None:
            if self._pinned and not self._on_device and (self._releasing or not waiting):
                self._pinned = self._releasing = False
                self._store.tell(Unpin(self._adapter, self._epoch))
            if waiting and not self._pinned and not self._pinning:
                self._pinning = True
                self._store.tell(Pin(self._adapter, self._epoch))
        if self._pinned and not self._releasing:
            for (_, background), lane in self._lanes.items():
                self._offer(lane, self._background_window if background else self._window)

    def _offer(self, lane: Lane, window: int) -> None:
        count = min(window - len(lane.offered), len(lane.waiting))
        if count > 0:
            logs = tuple(lane.take(count))
            lane.offered.update(log.id for log in logs)
            self._on_device.update(log.id for log in logs)
            self._scheduler.tell(Submit(logs, self._epoch))

    def _cancel(self, ids: tuple[str, ...]) -> None:
        lanes = list(self._lanes.values())
        waiting = tuple(id for id in ids if any(lane.waiting.pop(id, None) is not None for lane in lanes))
        self._refuse(waiting, "Cancelled", "withdrawn before it started")
        on_device = tuple(id for id in ids if id in self._on_device)
        if on_device:
            self._scheduler.tell(Cancel(on_device, self._epoch))

    def _refuse(self, ids: tuple[str, ...], kind: str, why: str) -> None:
        if ids:
            self._refused.update(ids)
            self._streamer.tell(Refused(ids, kind, why))

    def _begin(self, epoch: int) -> None:
        """Forget everything: the engine core has restarted and has no sequences. Live sequences are enqueued
        again."""
        self._epoch = epoch
        self._lanes.clear()
        self._on_device.clear()
        self._pinned = self._adapter is None
        self._pinning = self._releasing = False
