"""Actors, and the cells that run them.

    class Greeter(Actor[str]):
        async def receive(self, message: str) -> None:
            print("hello", message)

An actor is plain state that handles one message at a time. A factory makes it. It lives until it stops or
raises, and is then thrown away, with anything that was left half done. What must survive it belongs to its
cell: the mailbox, the refs that point to it, the counters. So a restart makes another actor, and holders of a
ref do not notice.

A cell runs one actor at a time (`run`, one epoch); its supervisor decides whether there is another. Within an
epoch:

- Stopping sets a flag and wakes the actor. It is not a message, so a full mailbox cannot delay it. The
  message in hand is finished first. If that takes too long, the supervisor cancels the actor through the
  cell's own scope.
- `stopped()` runs whenever `started()` succeeded, after a crash too. It is shielded from cancellation, with a
  time limit.
- `start_soon` tasks belong to the epoch: they end before `stopped()`, and if one raises, the actor crashes.
- A busy actor yields to the loop every few messages, even if its `receive` never waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, TypeVar, TypeVarTuple

from anyio import (
    CancelScope,
    CapacityLimiter,
    create_task_group,
    current_effective_deadline,
    get_cancelled_exc_class,
    move_on_after,
)
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from personae.actors.kit.bridge import Loop
from personae.actors.kit.mailbox import Mailbox, Ref

M = TypeVar("M")
T = TypeVar("T")
Args = TypeVarTuple("Args")

State = Literal["new", "starting", "idle", "busy", "stopping", "down", "closed"]

MESSAGES_PER_TURN = 16  # handled without waiting before other tasks get the loop


class Actor(ABC, Generic[M]):
    """Derive from it and write `receive`. `self.ref` and the other helpers work from `started()` on, not in
    `__init__`."""

    _cell: "ActorCell[M]"
    _tasks: TaskGroup

    @property
    def ref(self) -> Ref[M]:
        """This actor's own ref, to pass to others."""
        return self._cell.ref

    async def started(self) -> None:
        """Run before the first message. An exception here is a failed start."""

    @abstractmethod
    async def receive(self, message: M) -> None:
        """Handle one message. An exception here is a crash: the supervisor decides what comes next."""

    async def stopped(self) -> None:
        """Run after the last message, whether the actor stops or has crashed."""

    @property
    def pending(self) -> bool:
        """Whether another message waits."""
        return bool(self._cell.mailbox.envelopes)

    def drain(self) -> list[M]:
        """Take every message that waits now, oldest first.

        An actor that wants to see all messages before it acts once writes:

            async def receive(self, message):
                for each in (message, *self.drain()):
                    self.note(each)
                self.act()

        The drained messages count as taken: a crash loses them, and fails the calls of `ask` that sent them.
        """
        messages = []
        while (envelope := self._cell.mailbox.take()) is not None:
            messages.append(envelope.message)
        self._cell.handled += len(messages)
        return messages

    def stop(self) -> None:
        """End after the message in hand. A permanent actor is then restarted."""
        self._cell.stop()

    async def in_thread(self, function: Callable[[*Args], T], *args: *Args, limiter: CapacityLimiter) -> T:
        """Run `function(*args)` on a worker thread, as many at a time as the limiter allows. It runs to its
        end even if this actor ends first."""
        return await self._cell.mailbox.loop.threads.call(function, *args, limiter=limiter)

    def start_soon(
        self, function: Callable[[*Args], Awaitable[object]], *args: *Args, name: str | None = None
    ) -> None:
        """Run a task concurrently with `receive`. It is cancelled when this actor stops or crashes. If it
        raises, the actor crashes."""
        name = name or getattr(function, "__qualname__", None) or repr(function)
        self._tasks.start_soon(_guarded, function, *args, name=f"{self._cell.path}:{name}")


class BaseCell(ABC, Generic[M]):
    """What all kinds of cells share: the mailbox, the ref and the values that gauges show."""

    def __init__(
        self, path: str, mailbox: Mailbox[M], report: Callable[[str, BaseException | None], None]
    ) -> None:
        self.path = path
        self.mailbox = mailbox
        self.ref: Ref[M] = Ref(mailbox)
        self.state: State = "new"
        self.handled = 0
        self.stop_timeout = 5.0
        self.stopping = False
        self._scope = CancelScope()
        self._report = report  # (what, error): calls the supervisor's report hook with this cell's path

    def begin(self) -> None:
        """Get ready for an epoch. It is called before `run` is scheduled, so that a `stop` in between is not
        lost."""
        self.state = "starting"
        self.stopping = False
        self._scope = CancelScope()

    @abstractmethod
    async def run(self, ready: Callable[[], None]) -> None:
        """Run one epoch. Calls `ready` when the actor has started. Raises the error that ended it; returns
        when it stopped."""

    def stop(self, final: bool = False) -> None:
        """Ask this epoch to end after the message in hand. Only supervisors use `final`."""
        self.stopping = True
        self.mailbox.wake()

    def cancel(self) -> None:
        """Cancel this epoch at once."""
        self._scope.cancel()

    def close(self) -> None:
        """Fail waiting calls of `ask` and refuse messages: there is no further epoch."""
        self.state = "closed"
        if dropped := self.mailbox.close():
            self._report(f"dropped {dropped} messages", None)


class ActorCell(BaseCell[M]):
    """The cell of an `Actor`."""

    def __init__(
        self,
        path: str,
        factory: Callable[[], Actor[M]],
        capacity: int,
        loop: Loop,
        report: Callable[[str, BaseException | None], None],
    ) -> None:
        super().__init__(path, Mailbox(path, capacity, loop), report)
        self._factory = factory
        self.actor: Actor[M] | None = None  # of this epoch, for inspection

    async def run(self, ready: Callable[[], None]) -> None:
        """Run one epoch. Calls `ready` when the actor has started. Raises the error that ended it; returns
        when it stopped."""
        failure: Exception | None = None
        try:
            with self._scope:
                await self._run_actor(self._factory(), ready)
        except Exception as error:
            failure = unwrap(error)
        finally:
            self.state = "down"
            self.actor = None
            self.mailbox.fail_owed(failure)
        if failure is not None:
            raise failure

    async def _run_actor(self, actor: Actor[M], ready: Callable[[], None]) -> None:
        actor._cell = self
        self.actor = actor
        started = False
        try:
            async with create_task_group() as actor._tasks:
                await _guarded(actor.started)
                started = True
                ready()
                await self._serve(actor)
                actor._tasks.cancel_scope.cancel()
        finally:
            self.state = "stopping"
            if started:
                await self._run_stopped(actor)

    async def _serve(self, actor: Actor[M]) -> None:
        mailbox = self.mailbox
        turn = MESSAGES_PER_TURN
        while not self.stopping:
            envelope = mailbox.take()
            if envelope is None:
                self.state = "idle"
                turn = MESSAGES_PER_TURN
                await mailbox.wait()
                continue
            self.state = "busy"
            try:
                await actor.receive(envelope.message)
            except get_cancelled_exc_class() as error:
                _check_scopes(error)
                raise
            self.handled += 1
            turn -= 1
            if not turn:
                turn = MESSAGES_PER_TURN
                await checkpoint()

    async def _run_stopped(self, actor: Actor[M]) -> None:
        with CancelScope(shield=True), move_on_after(self.stop_timeout) as scope:
            try:
                await _guarded(actor.stopped)
            except Exception as error:
                self._report("stopped() raised", error)
        if scope.cancelled_caught:
            self._report(f"stopped() took over {self.stop_timeout} s", None)


async def _guarded(function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    """Await the function. A cancellation that none of our scopes asked for (a cancelled asyncio future)
    becomes an error instead of silence."""
    try:
        await function(*args)
    except get_cancelled_exc_class() as error:
        _check_scopes(error)
        raise


def _check_scopes(cancellation: BaseException) -> None:
    """Raise RuntimeError if none of our scopes asked for this cancellation."""
    if current_effective_deadline() > float("-inf"):
        raise RuntimeError("something that the actor awaited was cancelled from outside") from cancellation


def unwrap(error: Exception) -> Exception:
    """Return the only exception of a group of one, else the error itself."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
