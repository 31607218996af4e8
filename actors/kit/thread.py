"""An actor that has a thread to itself.

A device context, its graphs and its memory belong to one thread, and a step blocks for milliseconds. A worker
pool fits neither: it uses a different thread each time, and returns results through a future. So the executor
has one thread for its whole epoch. It gets messages from its mailbox and sends with `post`.

- *Envelopes and tokens.* Envelopes lie in the cell's deque, as for any actor, so depth, age and back-pressure
  are the same. The thread sleeps on a `queue.SimpleQueue`, which has one token per envelope and one for each
  other reason to wake. A token without an envelope means "check the flags". There are never fewer tokens than
  envelopes, so none is missed.
- *The loop's state stays on the loop.* The thread appends to nothing that the loop iterates over and sets no
  event of the loop itself. What it reports (started, ended, there is room, a posted message) goes through
  `Loop.call_soon`, in order.
- *A thread cannot be killed.* One that does not stop in time is reported and left behind as a daemon thread.
  It is then abandoned: it gets no further message, and what it posts is refused, so it cannot act for its
  successor.
- *A post to a full mailbox is a crash.* The poster has gone on and cannot wait, and a lost result would leave
  the other side waiting for ever. Restarting both sides from the log is the only clean way out. A post to an
  actor that has stopped is only reported: it is normal during shutdown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from anyio import Event

from personae.actors.kit.actor import BaseCell, State
from personae.actors.kit.bridge import Loop
from personae.actors.kit.mailbox import Envelope, Mailbox, Ref, Reply
from personae.errors import ActorStopped, Overloaded

M = TypeVar("M")
T = TypeVar("T")


class ThreadMailbox(Mailbox[M]):
    """A mailbox whose reader is a thread. All methods but `next_envelope` and `take` are for the loop."""

    def __init__(self, path: str, capacity: int, loop: Loop) -> None:
        super().__init__(path, capacity, loop)
        self._tokens = loop.threads.wakeup()

    def wake(self) -> None:
        """Wake the thread."""
        self._tokens.put(None)

    def take(self) -> Envelope[M] | None:
        """Take the next envelope, if any, and its token."""
        try:
            envelope = self.envelopes.popleft()
        except IndexError:
            return None
        self._tokens.get()
        return self._taken(envelope)

    def next_envelope(self) -> Envelope[M] | None:
        """Sleep until there is a token. Returns None if it came without an envelope."""
        self._tokens.get()
        try:
            return self._taken(self.envelopes.popleft())
        except IndexError:
            return None

    def _taken(self, envelope: Envelope[M]) -> Envelope[M]:
        if envelope.reply is not None and envelope.reply.waiting:
            self.owed.add(envelope.reply)
        if self._senders:
            self.loop.call_soon(self.admit)
        return envelope


class ThreadActor(ABC, Generic[M]):
    """Like `Actor`, with plain functions. All of them, and the factory, are called on the actor's own
    thread."""

    _epoch: "_ThreadRun[M]"
    time: Callable[[], float]
    """Returns a time in seconds on this thread's clock, for differences."""

    @property
    def ref(self) -> Ref[M]:
        """This actor's own ref, to pass to others."""
        return self._epoch.cell.ref

    def started(self) -> None:
        """Run before the first message. An exception here is a failed start."""

    @abstractmethod
    def receive(self, message: M) -> None:
        """Handle one message. An exception here is a crash: the supervisor decides what comes next."""

    def stopped(self) -> None:
        """Run after the last message, whether the actor stops or has crashed."""

    def sleep(self, seconds: float) -> None:
        """Sleep on this thread. Messages queue up meanwhile."""
        self._epoch.cell.mailbox.loop.threads.sleep(seconds)

    @property
    def pending(self) -> bool:
        """Whether another message waits. False once the actor is stopping."""
        return not self._epoch.stopping and bool(self._epoch.cell.mailbox.envelopes)

    def try_next(self) -> M | None:
        """Return the next message if one waits, else None. Never waits."""
        return self._epoch.take()

    def stop(self) -> None:
        """End after the message in hand. A permanent actor is then restarted."""
        self._epoch.stopping = True

    def post(self, to: "Ref[T] | Reply[T]", message: T) -> None:
        """Send a message to an actor of the loop, or reply to an `ask`, from this thread. Never waits;
        messages arrive in the order posted.

        If the target's mailbox is full, this actor crashes. Raises ActorStopped if this actor was abandoned.
        """
        self._epoch.call_loop(self._epoch.deliver, to, message)

    def fail(self, reply: "Reply[T]", error: BaseException) -> None:
        """Reply to an `ask` with an error, from this thread."""
        self._epoch.call_loop(reply.fail, error)


class _ThreadRun(Generic[M]):
    """One epoch of a thread actor: the flags that its thread and the loop share."""

    def __init__(self, cell: "ThreadCell[M]", ready: Callable[[], None]) -> None:
        self.cell = cell
        self.stopping = False  # take no further message
        self.abandoned = False  # the loop does not wait for it any more
        self.error: Exception | None = None
        self.ended = Event()
        self._ready = ready

    def main(self, factory: Callable[[], ThreadActor[M]]) -> None:
        """Run the thread."""
        error: BaseException | None = None
        try:
            self._run_actor(factory)
        except BaseException as raised:  # anything at all: the loop must learn of it
            error = raised
        self.cell.mailbox.loop.call_soon(self._end, error)

    def _run_actor(self, factory: Callable[[], ThreadActor[M]]) -> None:
        actor = factory()
        actor._epoch = self
        actor.time = self.cell.mailbox.loop.threads.time
        actor.started()
        self.call_loop(self._ready)
        try:
            self._serve(actor)
        finally:
            self.show("stopping")
            try:
                actor.stopped()
            except Exception as error:
                self.cell.mailbox.loop.call_soon(self.cell._report, "stopped() raised", error)

    def _serve(self, actor: ThreadActor[M]) -> None:
        cell = self.cell
        while not self.stopping:
            envelope = cell.mailbox.take()
            if envelope is None:
                self.show("idle")
                envelope = cell.mailbox.next_envelope()
                if envelope is None:
                    continue
            self.show("busy")
            actor.receive(envelope.message)
            cell.handled += 1
        if self.error is not None:
            raise self.error

    def show(self, state: State) -> None:
        if not self.abandoned:
            self.cell.state = state

    def take(self) -> M | None:
        if self.stopping:
            return None
        envelope = self.cell.mailbox.take()
        if envelope is None:
            return None
        self.cell.handled += 1
        return envelope.message

    def call_loop(self, function: Callable[..., object], *args: object) -> None:
        if self.abandoned:
            raise ActorStopped(f"{self.cell.path} was abandoned and cannot post")
        self.cell.mailbox.loop.call_soon(function, *args)

    def deliver(self, to: Ref[T] | Reply[T], message: T) -> None:
        if self.abandoned:
            return
        try:
            to.tell(message)
        except ActorStopped as error:
            self.cell._report(f"posted to a stopped actor ({error.message})", None)
        except Overloaded as error:
            self.error = error
            self.stopping = True
            self.cell.mailbox.wake()

    def _end(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):
            self.error = RuntimeError(f"its thread was ended by {error!r}")
            self.error.__cause__ = error
        else:
            self.error = error or self.error
        if self.abandoned and self.error is not None:
            self.cell._report("crashed after it was abandoned", self.error)
        self.ended.set()


class ThreadCell(BaseCell[M]):
    """The cell of a `ThreadActor`. Each epoch has a new thread."""

    mailbox: ThreadMailbox[M]
    _epoch: _ThreadRun[M] | None = None

    def __init__(
        self,
        path: str,
        factory: Callable[[], ThreadActor[M]],
        capacity: int,
        loop: Loop,
        report: Callable[[str, BaseException | None], None],
    ) -> None:
        super().__init__(path, ThreadMailbox(path, capacity, loop), report)
        self._factory = factory

    async def run(self, ready: Callable[[], None]) -> None:
        """Run one epoch, as any cell. Returns also when the thread was abandoned."""
        epoch = self._epoch = _ThreadRun(self, ready)
        epoch.stopping = self.stopping
        thread = self.mailbox.loop.threads.start(partial(epoch.main, self._factory), self.path)
        try:
            with self._scope:
                await epoch.ended.wait()
                thread.join()  # it has reported its end and is a few instructions from it
        finally:
            epoch.stopping = True
            epoch.abandoned = not epoch.ended.is_set()
            self._epoch = None
            self.state = "down"
            self.mailbox.fail_owed(epoch.error)
        if epoch.abandoned:
            self._report("left its thread behind: it does not stop", None)
        if epoch.error is not None:
            raise epoch.error

    def stop(self, final: bool = False) -> None:
        """Ask this epoch to end after the message in hand."""
        if self._epoch is not None:
            self._epoch.stopping = True
        super().stop(final)
