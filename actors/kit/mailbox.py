"""Mailboxes, and the two handles that point to them: `Ref` (an actor) and `Reply` (one call of `ask`).

    Overloaded        the mailbox is full                                   (personae.errors)
    └── ActorStopped  the actor is gone for good; no message reaches it
    ActorCrashed      the actor died or restarted after it took the message, and did not reply

Design:

- *The logic is synchronous.* `put` takes the message or raises. Code on the loop can send without awaiting,
  so no sender is suspended halfway, and there is no state between "sent" and "not sent". `send` and `ask`
  only wait around it; they decide nothing.
- *The mailbox belongs to the cell, not to the actor.* A restart replaces the actor; refs and waiting messages
  stay.
- *Every mailbox is bounded.* An unbounded mailbox turns overload into latency and then into a dead process. A
  full one refuses at once. Waiting senders get room in the order in which they came: a `tell` cannot overtake
  them.
- *Every `ask` gets exactly one reply.* The mailbox knows which messages carry a `Reply` and which of those
  the actor has taken. So it fails exactly the callers that would wait for ever, and no others.
- *No cancel scope crosses.* A caller that gives up stops waiting. The message is not taken back, and the
  actor is not interrupted. A handler can check `reply.waiting`.
"""

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Generic, TypeVar

from anyio import CancelScope, Event
from msgspec import Struct

from personae.actors.kit.bridge import Loop
from personae.actors.kit.signal import Signal
from personae.errors import ActorCrashed, ActorStopped, DeadlineExceeded, Overloaded

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
T = TypeVar("T")


class Reply(Generic[T]):
    """Where to reply to one call of `ask`, once. The first `tell` or `fail` counts; later ones, or ones after
    the deadline, are ignored.

    Use it on the loop. A thread actor uses `self.post(reply, value)`.
    """

    __slots__ = ("_error", "_event", "_mailbox", "_value")

    def __init__(self, mailbox: "Mailbox[object]") -> None:
        self._event = Event()
        self._error: BaseException | None = None
        self._value: T | None = None
        self._mailbox: Mailbox[object] | None = mailbox

    @property
    def waiting(self) -> bool:
        """Whether the caller still waits."""
        return self._mailbox is not None

    def tell(self, value: T) -> None:
        """Reply with a value."""
        if self._settle():
            self._value = value

    def fail(self, error: BaseException) -> None:
        """Reply with an error, which `ask` raises."""
        if self._settle():
            self._error = error

    def _settle(self) -> bool:
        if self._mailbox is None:
            return False
        self._mailbox.owed.discard(self)
        self._mailbox = None
        self._event.set()
        return True

    async def _wait(self, deadline: float | None) -> T:
        with CancelScope(deadline=float("inf") if deadline is None else deadline):
            try:
                await self._event.wait()
            finally:
                expired = self._settle()
        if expired:
            raise DeadlineExceeded("no answer from the actor before the deadline")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # settled without an error: `tell` has set it


class Envelope(Struct, Generic[M], eq=False):
    """A message in a mailbox: the time when it was put there, on the loop's clock, and the reply if it came
    from `ask`."""

    message: M
    time: float
    reply: Reply[object] | None


class Mailbox(Generic[M]):
    """A bounded queue with one reader: `envelopes`, the oldest first. `wake` also wakes the reader for what
    is not a message (stop)."""

    def __init__(self, path: str, capacity: int, loop: Loop) -> None:
        if capacity < 1:
            raise ValueError(f"{path}: a mailbox holds at least one message, not {capacity}")
        self.path = path
        self.capacity = capacity
        self.loop = loop
        self.closed = False
        self.owed: set[Reply[object]] = set()  # of messages that the actor has taken and not replied to
        self.envelopes: deque[Envelope[M]] = deque()
        self._senders: deque[tuple[Envelope[M], Event]] = deque()
        self._wakeup = Signal()

    @property
    def oldest(self) -> float | None:
        """When the oldest waiting message was put, on the loop's clock."""
        try:
            return self.envelopes[0].time
        except IndexError:
            return None

    def put(self, message: M, reply: Reply[object] | None = None) -> None:
        """Queue a message. Raises Overloaded when full, ActorStopped when closed, RuntimeError on another
        thread than the loop's."""
        if self.closed or get_ident() != self.loop.thread:
            self._check()
        if self._senders or len(self.envelopes) >= self.capacity:
            raise Overloaded(f"{self.path}: its mailbox of {self.capacity} is full")
        self.envelopes.append(Envelope(message, self.loop.time(), reply))
        self.wake()

    async def wait_to_put(self, message: M) -> None:
        """Queue a message as soon as there is room, in order of the calls. Raises ActorStopped if the mailbox
        closes before."""
        self._check()
        if not self.full:
            self._push(Envelope(message, self.loop.time(), None))
            return
        sender = (Envelope(message, self.loop.time(), None), Event())
        self._senders.append(sender)
        self.admit()  # a reader on another thread may have made room since we looked
        try:
            await sender[1].wait()
        finally:
            delivered = sender not in self._senders
            if not delivered:
                self._senders.remove(sender)
        if not delivered:
            raise self._stopped()

    @property
    def full(self) -> bool:
        """Whether `put` would refuse. Waiting senders come first, so the mailbox counts as full while there
        are any."""
        return len(self.envelopes) >= self.capacity or bool(self._senders)

    def take(self) -> Envelope[M] | None:
        """Return the next message, or None. If it came from `ask`, a reply is owed from now on."""
        if not self.envelopes:
            return None
        envelope = self.envelopes.popleft()
        if envelope.reply is not None and envelope.reply.waiting:
            self.owed.add(envelope.reply)
        if self._senders:
            self.admit()
        return envelope

    def admit(self) -> None:
        """Let waiting senders in while there is room."""
        while self._senders and len(self.envelopes) < self.capacity:
            envelope, event = self._senders.popleft()
            self._push(envelope)
            event.set()

    def wake(self) -> None:
        """Wake the reader."""
        self._wakeup.set()

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        await self._wakeup.wait()

    def fail_owed(self, cause: BaseException | None) -> None:
        """Fail the replies that are owed: the actor that took their messages is gone, and the next one does
        not know them."""
        for reply in tuple(self.owed):
            error = ActorCrashed(f"{self.path} ended before it answered")
            error.__cause__ = cause
            reply.fail(error)

    def close(self) -> int:
        """Refuse messages from now on: fail all calls of `ask`, wake all senders. Returns how many messages
        are dropped unread."""
        if self.closed:
            return 0
        self.closed = True
        dropped = len(self.envelopes)
        while self.envelopes:
            envelope = self.envelopes.popleft()
            if envelope.reply is not None:
                envelope.reply.fail(self._stopped())
        for reply in tuple(self.owed):
            reply.fail(self._stopped())
        for _, event in self._senders:
            event.set()
        return dropped

    def _push(self, envelope: Envelope[M]) -> None:
        self.envelopes.append(envelope)
        self.wake()

    def _stopped(self) -> ActorStopped:
        return ActorStopped(f"{self.path} has stopped")

    def _check(self) -> None:
        if self.closed:
            raise self._stopped()
        if get_ident() != self.loop.thread:
            raise RuntimeError(
                f"{self.path}: called on another thread; a thread actor uses self.post(ref, message)"
            )


class Ref(Generic[M_contra]):
    """The handle of an actor: small, freely shared, valid across restarts. Use it on the loop's thread."""

    __slots__ = ("_mailbox",)

    def __init__(self, mailbox: Mailbox[M_contra]) -> None:
        self._mailbox = mailbox

    def __repr__(self) -> str:
        return f"<Ref {self.path}>"

    @property
    def path(self) -> str:
        """The actor's path in its tree, such as `core/scheduler`."""
        return self._mailbox.path

    def tell(self, message: M_contra) -> None:
        """Put a message in the mailbox now. Raises Overloaded when it is full, ActorStopped when the actor is
        gone."""
        self._mailbox.put(message)

    async def send(self, message: M_contra) -> None:
        """Put a message in the mailbox, and wait for room if necessary. Raises ActorStopped. If it is
        cancelled, the message may or may not have been put."""
        await self._mailbox.wait_to_put(message)

    async def ask(self, message: "Callable[[Reply[T]], M_contra]", *, deadline: float | None = None) -> T:
        """Put `message(reply)` in the mailbox and wait for the reply.

        `deadline` is absolute, on `anyio.current_time`'s clock. Raises Overloaded or ActorStopped as `tell`
        does, ActorCrashed if the actor dies or restarts with the message in hand, DeadlineExceeded (without
        sending anything if the deadline has passed), and any error that the actor passes to `reply.fail`. Two
        actors that ask each other wait for ever: within the tree use `tell`, and `ask` only from outside.
        """
        if deadline is not None and deadline <= self._mailbox.loop.time():
            raise DeadlineExceeded(f"the deadline passed before {self.path} was asked")
        mailbox: Mailbox[object] = self._mailbox  # type: ignore[assignment]  # a Reply only ever discards itself there
        reply: Reply[T] = Reply(mailbox)
        self._mailbox.put(message(reply), reply)  # type: ignore[arg-type]  # the mailbox never reads the value
        return await reply._wait(deadline)
