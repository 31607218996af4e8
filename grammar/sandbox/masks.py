"""Answers that are bound by a client's grammar, whose masks are made in a separate process.

Nothing here waits longer than its caller allows. A mask is requested when its answer's token is known, and
arrives later, or never. `mask_server.py` is the other side. A process that was ended from outside is replaced
by another one, which gets the tokens of the answers again; they wait for their masks meanwhile.
"""

import math
import select
import socket
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from threading import Condition, RLock, Thread
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from personae.errors import GRAMMAR_DELAYED, GRAMMAR_TOO_SLOW, Overloaded, PersonaeError
from personae.grammar.bitmask import Bitmask
from personae.grammar.matcher import UNDECIDED, Binding, Snapshot, Undecided, Words
from personae.grammar.sandbox.mask_server import (
    REPLIES,
    Ask,
    BeginAnswer,
    End,
    Keep,
    Mask,
    MaskReply,
    Operation,
    Restore,
    Take,
    TokenRefused,
    TooSlow,
    Veto,
)
from personae.grammar.sandbox.server import ATTEMPTS, HEAD, ChildEnded, is_end, length_of

PROCESS_BYTES = 16 * 2**20  # of a process, in addition to what it shares; measured at 100k tokens
TENANT_PROCESSES = 24
PROCESSES = 64
PLACE_PATIENCE = 40.0  # seconds that a compile waits for one of them
_ROOM_SECONDS = 0.05  # between two looks for processes that bind no answer any more
_SPENT = "the masks of its grammar take too long: the grammar is ambiguous, make it simpler"
_LOST = "the processes that make the masks of its grammar were ended again and again; try again later"
_LATE = "the machine was too busy to make the masks of its grammar; try again later"
_PATIENCE = 0.01  # seconds that steps wait for the masks of one answer in total
_PATIENCE_PER_MASK = 0.0005
_REFUSED = "the grammar does not allow the sampled token {}"


class Processes:
    """Counts the live processes, in total and by tenant."""

    def __init__(
        self,
        most: int = PROCESSES,
        most_of_tenant: int = TENANT_PROCESSES,
        patience: float = PLACE_PATIENCE,
    ) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._patience = patience
        self._live: Counter[str] = Counter()
        # Reentrant: a grammar may be collected, and leave, while its thread is in here.
        self._changed = Condition(RLock())

    def enter(self, tenant: str, make_room: Callable[[str | None], None]) -> None:
        """Count one more process of this tenant, as soon as there is room. `make_room` releases processes
        that bind no answer, of a tenant or of all. Raises Overloaded if there is no room for too long."""
        until = time.monotonic() + self._patience
        while True:
            with self._changed:
                full = self._live.total() >= self._most
                if not full and self._live[tenant] < self._most_of_tenant:
                    self._live[tenant] += 1
                    return
            make_room(None if full else tenant)
            with self._changed:
                if self._live.total() < self._most and self._live[tenant] < self._most_of_tenant:
                    continue
                if time.monotonic() >= until:
                    raise Overloaded("Too many grammars of your own are in use at once; try again later.")
                self._changed.wait(_ROOM_SECONDS)

    def leave(self, tenant: str) -> None:
        """Count one process less."""
        with self._changed:
            self._live[tenant] -= 1
            if not self._live[tenant]:
                del self._live[tenant]
            self._changed.notify_all()

    @property
    def live(self) -> int:
        """How many processes are live."""
        return self._live.total()


Opened = tuple[socket.socket, int]
"""A connection to a process that makes masks, and the tokens of the grammar's shortest answer."""


class RemoteGrammar:
    """A `Grammar` (matcher.py) whose process ends when nothing refers to the grammar any more. Its answers
    belong to one thread.

    `reopen` gives a new process in place of one that was ended from outside; without it, or if that happens
    `ATTEMPTS` times before a mask was made, the answers fail. So does an answer that has waited for its masks
    for `wall` seconds in all.
    """

    remote: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    nbytes = PROCESS_BYTES

    def __init__(
        self,
        connection: socket.socket,
        shortest: int,
        left: Callable[[], None] = lambda: None,
        reopen: Callable[[], Opened] | None = None,
        wall: float = math.inf,
    ) -> None:
        self.shortest = shortest
        self.wall = wall
        self._left = left
        self._reopen = reopen
        self._reopening: Future[Opened] | None = None
        self._attempts = 0
        self._ids = count()
        self._answers: weakref.WeakValueDictionary[int, RemoteMatcher] = weakref.WeakValueDictionary()
        self._sending = bytearray()
        self._received = bytearray()
        self._ended = False
        self._use(connection)

    def __del__(self) -> None:
        if self._reopening is not None:
            self._reopening.add_done_callback(_close_opened)
        self._left()

    def _use(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        # Not in `__del__`: a collector that finds a cycle may end the socket before this object.
        weakref.finalize(self, connection.close).atexit = False

    @property
    def ended(self) -> bool:
        """See Grammar."""
        if self._ended or self._reopening is not None:
            return self._ended
        try:
            head = self._connection.recv(HEAD, socket.MSG_PEEK)
            return not head or is_end(head)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def idle(self) -> bool:
        """See Grammar."""
        return not self._answers

    @property
    def reopening(self) -> bool:
        """Whether the process is being replaced."""
        return self._reopening is not None

    def begin(self, budget: int, tokens: Sequence[int] = ()) -> "RemoteMatcher":
        """See Grammar."""
        id = next(self._ids)
        answer = self._answers[id] = RemoteMatcher(self, id, budget, tokens)
        if self._ended:
            self._replace()
        else:
            answer.begin()
        return answer

    def end(self, id: int) -> None:
        """End an answer."""
        if self._answers.pop(id, None) is not None:
            self.send(End(id))

    def send(self, operation: Operation) -> None:
        """Send an operation to the process. One that is being replaced gets the answers as a whole later."""
        if self._reopening is None:
            frame = msgspec.msgpack.encode(operation)
            self._sending += len(frame).to_bytes(HEAD, "big") + frame
        self.poll()

    def wait(self, seconds: float) -> None:
        """Wait until a report arrives, at most so many seconds."""
        if not self._ended and self._reopening is None and seconds > 0:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            poll.poll(1000 * seconds)
        self.poll()

    def poll(self) -> None:
        """Send and receive without waiting."""
        if self._reopening is not None:
            self._reopened(self._reopening)
        if self._ended or self._reopening is not None:
            return
        try:
            while self._sending:
                del self._sending[: self._connection.send(self._sending)]
        except BlockingIOError:
            pass
        except OSError:
            self._sending.clear()
        closed = False
        try:
            while piece := self._connection.recv(2**18):
                self._received += piece
            closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        try:
            self._take_in()
        except ChildEnded as error:
            if error.exceeded:
                self._fail(_SPENT, GRAMMAR_TOO_SLOW)
                return
            closed = True
        if closed:
            self._replace()

    def _take_in(self) -> None:
        received, at = self._received, 0
        while len(received) - at >= HEAD:
            end = at + HEAD + length_of(bytes(received[at : at + HEAD]))
            if end > len(received):
                break
            report = REPLIES.decode(memoryview(received)[at + HEAD : end])
            if (answer := self._answers.get(report.id)) is not None:
                answer.handle(report)
            self._attempts = 0
            at = end
        if at:
            del received[:at]

    def _fail(self, why: str, code: str | None = None) -> None:
        """End all answers."""
        self._ended = True
        for answer in [*self._answers.values()]:
            answer.fail(why, code)

    def _replace(self) -> None:
        """Have another process made, on a thread of its own, if an answer needs one."""
        self._connection.close()
        self._sending.clear()
        self._received.clear()
        self._ended = True
        if not self._answers:
            return
        self._attempts += 1
        if self._reopen is None or self._attempts > ATTEMPTS:
            self._fail(_LOST, GRAMMAR_DELAYED)
            return
        self._ended, self._reopening = False, Future()
        Thread(target=_open, args=(self._reopen, self._reopening), name="reopen", daemon=True).start()

    def _reopened(self, opened: Future[Opened]) -> None:
        """The answers go on in the new process, if it is there."""
        if not opened.done():
            return
        self._reopening = None
        try:
            connection, _ = opened.result()
        except PersonaeError as error:
            self._fail(f"its grammar could not be compiled again: {error.message}")
            return
        self._use(connection)
        for answer in [*self._answers.values()]:
            answer.begin_again()


def _open(reopen: Callable[[], Opened], opened: Future[Opened]) -> None:
    try:
        opened.set_result(reopen())
    except BaseException as error:
        opened.set_exception(error)


def _close_opened(opened: Future[Opened]) -> None:
    """Nobody needs it any more."""
    if opened.exception() is None:
        opened.result()[0].close()


class _Snapshot(NamedTuple):
    """A point of a `RemoteMatcher`: the reports so far, and how many were requested. `process` is the number
    of processes that it has had."""

    number: int
    process: int
    length: int
    mask: NDArray[np.int32] | None
    verifies: bool
    failure: tuple[str, str | None] | None
    reports: int


class RemoteMatcher(Binding):
    """A binding whose mask may not have arrived yet. It never terminates: after the end the masks allow stop
    tokens."""

    remote = True
    verifies = False
    failure: tuple[str, str | None] | None = None

    def __init__(self, grammar: RemoteGrammar, id: int, budget: int, tokens: Sequence[int]) -> None:
        self.id = id
        self._grammar = grammar
        self._budget = budget
        self._tokens = [*tokens]  # accepted so far
        self._mask: NDArray[np.int32] | None = None
        self._asked: int | None = None
        self._vetoes: dict[int, bytes | None] = {}  # vetoes at this position, by token
        self._reports = self._mask_report = 0  # requested so far
        self._awaited: deque[int | None] = deque()  # their numbers; None for those that were undone
        self._failed = False  # for good: no snapshot is older
        self._waited = 0.0  # seconds, for reports that have come
        self._since: float | None = None  # when it began to wait for a report
        self._snapshots = 0
        self._process = 0
        self._patience = _PATIENCE

    @property
    def _left(self) -> int:
        return self._budget - len(self._tokens)

    def begin(self) -> None:
        """Have the process begin the answer, with its tokens so far."""
        self._await(BeginAnswer(self.id, min(self._budget, 2**31), tuple(self._tokens)))

    def begin_again(self) -> None:
        """Begin in a process that knows nothing of the answer."""
        self._process += 1
        self._awaited.clear()
        if self.failure is not None or self._left <= 0:
            return  # it asks for nothing; `restore` begins it
        asked = self._asked
        self.begin()
        if asked is not None and asked not in self._vetoes:
            self._await(Ask(self.id, asked))

    @property
    def ready(self) -> bool:
        """See Binding."""
        if self._known:
            return True
        self._grammar.poll()
        if not self._known and self._waited_so_far > self._grammar.wall:
            self.fail(_LATE, GRAMMAR_DELAYED)
        return self._known

    @property
    def _waited_so_far(self) -> float:
        return self._waited + (0.0 if self._since is None else time.monotonic() - self._since)

    @property
    def _known(self) -> bool:
        return self.failure is not None or (
            self._mask is not None and (self._asked is None or self._asked in self._vetoes)
        )

    def wait(self, deadline: float) -> bool:
        """See Binding. It does not wait if this answer's masks mostly take longer."""
        while not self.ready:
            begun = time.monotonic()
            seconds = min(deadline - begun, self._patience)
            if seconds <= 0 or self._grammar.reopening:
                return False
            self._grammar.wait(seconds)
            self._patience -= time.monotonic() - begun
        return True

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Write the tokens allowed next. Allows all tokens if they are not known yet, or if the matcher has
        failed."""
        if self._mask is None:
            self._grammar.poll()
        bitmask[row] = -1 if self._mask is None or self.failure is not None else self._mask

    def accept(self, token: int) -> bool:
        """Advance by one token. It becomes known later whether it is allowed; after the last token nothing is
        requested."""
        self._mask, self._asked = None, None
        self._vetoes.clear()
        self._tokens.append(token)
        if self._left > 0 and self.failure is None:
            self._patience = min(self._patience + _PATIENCE_PER_MASK, _PATIENCE)
            self._await(Take(self.id, token))
        return True

    def veto(self, token: int, deadline: float = 0.0) -> Words | Undecided | None:
        """What to exclude instead of accepting `token`; UNDECIDED if that is not known yet. When the position
        is computed again, the result is the same."""
        if self.failure is None and token not in self._vetoes:
            if self._asked != token:
                self._asked = token
                self._await(Ask(self.id, token))
            if not self.wait(deadline):
                return UNDECIDED
        words = self._vetoes.get(token)
        return None if words is None else np.frombuffer(words, np.uint32)

    def snapshot(self) -> Snapshot:
        """The answer's current point. The last `MOST_RESTORED` can be restored."""
        self._snapshots += 1
        self._grammar.send(Keep(self.id, self._snapshots))
        return _Snapshot(
            self._snapshots,
            self._process,
            len(self._tokens),
            self._mask,
            self.verifies,
            self.failure,
            self._reports,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Undo what was accepted since. The mask is there if it was there before."""
        at: _Snapshot = snapshot
        del self._tokens[at.length :]
        self._mask, self.verifies = at.mask, at.verifies
        self._asked = None
        self._vetoes.clear()
        if not self._failed:
            self.failure = at.failure
        for place, report in enumerate(self._awaited):
            if report is not None and (report > at.reports or at.process != self._process):
                self._awaited[place] = None
        if at.process == self._process:
            self._await(Restore(self.id, at.number, at.mask is None))
        elif self.failure is None:
            self.begin()

    def end(self) -> None:
        """End the answer."""
        self._grammar.end(self.id)

    def fail(self, why: str, code: str | None) -> None:
        """The answer cannot go on."""
        self.failure, self._failed = (why, code), True

    def _await(self, operation: BeginAnswer | Take | Ask | Restore) -> None:
        if not isinstance(operation, Restore) or operation.mask:
            self._reports += 1
            self._awaited.append(self._reports)
            if self._since is None:
                self._since = time.monotonic()
        if not isinstance(operation, Ask):
            self._mask_report = self._reports
        self._grammar.send(operation)

    def handle(self, report: MaskReply) -> None:
        """Handle a report of the process."""
        number = 0 if isinstance(report, TooSlow) else self._awaited.popleft()
        if not self._awaited and self._since is not None:
            self._waited += time.monotonic() - self._since
            self._since = None
        if number is None:
            return
        match report:
            case Mask(words=words, verifies=verifies) if number == self._mask_report:
                self._mask, self.verifies = np.frombuffer(words, np.int32), verifies
            case Veto(token=token, words=left_out):
                if token == self._asked:
                    self._vetoes[token] = left_out
            case TooSlow():
                self.fail(_SPENT, GRAMMAR_TOO_SLOW)
            case TokenRefused(token=token):
                self.failure = _REFUSED.format(token), None
