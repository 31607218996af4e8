"""Admits submissions or refuses them, and routes messages about sequences to their adapters' queues."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from personae.actors.kit.actor import Actor
from personae.actors.kit.mailbox import Ref
from personae.actors.messages import (
    Cancel,
    CloseStream,
    EngineCoreStarted,
    Enqueue,
    Message,
    OpenStream,
    Preempted,
    Progress,
    Refused,
    Replay,
    Resubmit,
    Shutdown,
    Submission,
    Withdraw,
)
from personae.engine.sequence import SequenceLog
from personae.errors import Overloaded, PersonaeError

LONGEST_RETRY = 120.0  # seconds; a client that has to wait longer does not come back

OpenQueue = Callable[[str | None], Ref[Message]]


class Ingress(Actor[Message]):
    """Knows every live sequence and which adapter's queue it is in.

    `open_queue` returns the queue of an adapter (None: the base), created on first use. `max_live` bounds the
    sequences that wait or run, and so bounds every mailbox behind this one. `backlog` returns how many
    seconds of work wait; refusals use it for `retry_after`. `on_started` is called when an engine core has
    started.
    """

    def __init__(
        self,
        streamer: Ref[Message],
        open_queue: OpenQueue,
        max_live: int,
        backlog: Callable[[], float] = lambda: 0.0,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._streamer = streamer
        self._open_queue = open_queue
        self._max_live = max_live
        self._backlog = backlog
        self._on_started = on_started
        self._adapter_of: dict[str, str | None] = {}
        self._withdrawn: set[str] = set()  # ids of sequences that have not ended yet
        self._epoch = 0
        self._held: dict[str, SequenceLog] | None = None  # new sequences, while suspects are tried
        self._shutdown_error: PersonaeError | None = None

    async def receive(self, message: Message) -> None:
        """Route one message."""
        match message:
            case Submission():
                self._admit(message)
            case Withdraw(ids=ids):
                live = tuple(id for id in ids if id in self._adapter_of)
                if live:
                    self._withdrawn.update(live)
                    self._streamer.tell(CloseStream(live))
                    self._route(live, lambda ids: Cancel(ids, self._epoch))
                    if held := tuple(id for id in live if self._held and self._held.pop(id, None)):
                        self._streamer.tell(Refused(held, "Cancelled", "withdrawn before it started"))
            case Progress(started=started, ended=ended):
                self._route(started, lambda ids: Progress(ids, ()))
                self._forget(ended)
            case Preempted(logs=logs, epoch=self._epoch):  # those of an earlier epoch come with `Resubmit`
                self._return(logs)
            case Shutdown(error=error):
                self._shutdown_error = error
                self._streamer.tell(message)
            case EngineCoreStarted(epoch=epoch, stats=stats):
                # Sequences that the streamer knows come back in `Resubmit`. Later ones belong to this epoch,
                # and wait until those are back.
                self._epoch = epoch
                self._held = {}
                self._streamer.tell(Replay(epoch, stats))
                self._on_started()
            case Resubmit(logs=logs, epoch=self._epoch, last=last):
                self._enqueue([log for log in logs if log.id not in self._withdrawn])
                if gone := tuple(log.id for log in logs if log.id in self._withdrawn):
                    self._streamer.tell(Refused(gone, "Cancelled", "withdrawn while the engine restarted"))
                if last and self._held is not None:
                    came, self._held = self._held, None
                    self._enqueue(came.values())

    def _return(self, logs: tuple[SequenceLog, ...]) -> None:
        """Put preempted sequences at the end of their queues, if they are still wanted."""
        self._route([log.id for log in logs], lambda ids: Progress((), ids))
        self._enqueue([log for log in logs if log.id not in self._withdrawn])
        if gone := tuple(log.id for log in logs if log.id in self._withdrawn):
            self._streamer.tell(Refused(gone, "Cancelled", "withdrawn while it waited for its adapter"))

    def _admit(self, submission: Submission) -> None:
        logs = submission.logs
        if self._shutdown_error is not None:
            submission.reply.fail(self._shutdown_error)
            return
        if len(self._adapter_of) + len(logs) > self._max_live:
            submission.reply.fail(overloaded(len(self._adapter_of), self._max_live, self._backlog()))
            return
        self._streamer.tell(OpenStream(logs, submission.inbox))
        self._accept(logs)
        submission.reply.tell(None)

    def _accept(self, logs: tuple[SequenceLog, ...]) -> None:
        """Put admitted sequences into their queues, or hold them while suspects are tried."""
        self._adapter_of.update((log.id, log.adapter) for log in logs)
        if self._held is None:
            self._enqueue(logs)
        else:
            self._held.update((log.id, log) for log in logs)

    def _forget(self, ids: Iterable[str]) -> None:
        """Forget sequences that have ended or moved to another replica."""
        self._route(ids, lambda ids: Progress((), ids))
        for id in ids:
            self._adapter_of.pop(id, None)
            if self._held:
                self._held.pop(id, None)
        self._withdrawn.difference_update(ids)

    def _enqueue(self, logs: Iterable[SequenceLog]) -> None:
        by_adapter = defaultdict(list)
        for log in logs:
            by_adapter[log.adapter].append(log)
        for adapter, mine in by_adapter.items():
            self._open_queue(adapter).tell(Enqueue(tuple(mine), self._epoch))

    def _route(self, ids: Iterable[str], make: Callable[[tuple[str, ...]], Message]) -> None:
        by_adapter = defaultdict(list)
        for id in ids:
            if id in self._adapter_of:
                by_adapter[self._adapter_of[id]].append(id)
        for adapter, mine in by_adapter.items():
            self._open_queue(adapter).tell(make(tuple(mine)))


def overloaded(live: int, max_live: int, backlog_seconds: float) -> Overloaded:
    """The refusal of a submission when `live` of `max_live` sequences are being served."""
    return Overloaded(
        f"The server holds {live} of at most {max_live} sequences; try again later.",
        retry_after=retry_after(backlog_seconds),
    )


def retry_after(seconds: float) -> float:
    """How long a refused client is asked to wait, if room is expected in so many seconds."""
    return min(max(seconds, 1.0), LONGEST_RETRY)
