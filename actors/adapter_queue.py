"""One adapter's requests, in order: pins the adapter, then offers a few at a time to the scheduler.

A burst for one adapter waits here, not in Back. The scheduler sees the head of every queue at once, so its
fairness policy always has a choice between adapters, and a cold adapter holds up its own requests only.
"""

from collections import OrderedDict

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    Cancel,
    Enqueue,
    Message,
    Pin,
    Pinned,
    Progress,
    Refused,
    Submit,
    Unpin,
)
from personae.engine.sequence import SequenceLog


class AdapterQueue(Actor[Message]):
    """The queue of one adapter, or of the base model (`adapter` None), which needs no pin.

    `window` is how many sequences may wait in the scheduler before this queue holds the rest back.
    """

    def __init__(
        self,
        adapter: str | None,
        store: Ref[Message],
        scheduler: Ref[Message],
        streamer: Ref[Message],
        window: int,
    ) -> None:
        self._adapter = adapter
        self._store = store
        self._scheduler = scheduler
        self._streamer = streamer
        self._window = window
        self._waiting: OrderedDict[str, SequenceLog] = OrderedDict()
        self._offered: set[str] = set()  # submitted, not started yet
        self._aboard: set[str] = set()  # submitted, not ended yet
        self._refused: set[str] = set()  # ended by this queue, which not everybody knows yet
        self._life = 0
        self._pinned = adapter is None
        self._pinning = False

    async def receive(self, message: Message) -> None:
        """Handle one message, then see what can move."""
        match message:
            case Enqueue(logs=logs, life=life):
                if life != self._life:
                    self._begin(life)
                self._waiting.update((log.id, log) for log in logs if log.id not in self._refused)
            case Pinned(error=error, life=self._life):
                self._pinning = False
                if error is None:
                    self._pinned = True
                else:
                    refused, self._waiting = tuple(self._waiting), OrderedDict()
                    self._refuse(refused, "RequestFailed", error)
            case Progress(started=started, ended=ended):
                self._offered.difference_update(started, ended)
                self._aboard.difference_update(ended)
                self._refused.difference_update(ended)
                for id in ended:
                    self._waiting.pop(id, None)
            case Cancel(ids=ids):
                self._cancel(ids)
        self._move()

    def _move(self) -> None:
        """Offer what the window allows; take or give back the pin."""
        if self._adapter is not None:
            if self._waiting and not self._pinned and not self._pinning:
                self._pinning = True
                self._store.tell(Pin(self._adapter, self._life))
            elif self._pinned and not self._waiting and not self._aboard:
                self._pinned = False
                self._store.tell(Unpin(self._adapter, self._life))
        if self._pinned and self._waiting and len(self._offered) < self._window:
            count = min(self._window - len(self._offered), len(self._waiting))
            logs = [self._waiting.popitem(last=False)[1] for _ in range(count)]
            self._offered.update(log.id for log in logs)
            self._aboard.update(log.id for log in logs)
            self._scheduler.tell(Submit(tuple(logs), self._life))

    def _cancel(self, ids: tuple[str, ...]) -> None:
        waiting = tuple(id for id in ids if self._waiting.pop(id, None) is not None)
        self._refuse(waiting, "Cancelled", "withdrawn before it started")
        aboard = tuple(id for id in ids if id in self._aboard)
        if aboard:
            self._scheduler.tell(Cancel(aboard, self._life))

    def _refuse(self, ids: tuple[str, ...], kind: str, why: str) -> None:
        if ids:
            self._refused.update(ids)
            self._streamer.tell(Refused(ids, kind, why))

    def _begin(self, life: int) -> None:
        """Back has started anew and knows nothing; what was here and is still wanted comes in again."""
        self._life = life
        self._offered.clear()
        self._aboard.clear()
        self._waiting.clear()
        self._pinned = self._adapter is None
        self._pinning = False
