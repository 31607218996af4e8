"""The executor's shell: one thread that owns the device, its memory and its graphs.

Step N+1 is started before step N is read, if it is planned by then, so the device does not wait for the host;
`engine/step.py` says in which order.

What a step brought is told when the device has work again and the masks are made, or there is no work:
telling wakes the loop's thread, which wants the interpreter for the better part of a millisecond (it takes in
the step, plans, writes to the frontend), and would have it while this thread needs it and the device waits.
Told then, it has it while this thread computes, or waits for the device.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from personae.actors.enginecore.step_recorder import StepRecorder
from personae.actors.kit.mailbox import Ref
from personae.actors.kit.thread import ThreadActor
from personae.actors.messages import (
    AdapterLoaded,
    AdapterLoadFailed,
    AdaptersEvicted,
    Borrow,
    Execute,
    Lend,
    LoadAdapter,
    Look,
    MemoryWanted,
    Message,
    Release,
    Repaid,
    Repay,
    Resumed,
    StepFinished,
)
from personae.actors.spec import StepRunner
from personae.engine.stats import StepTimings
from personae.engine.worker.worker import AdapterTicket
from personae.errors import ActorStopped, AdapterError, Overloaded
from personae.lora.source import AdapterSource

CHORE_SHARE = 0.2
GRACE_SECONDS = 0.001  # for the next plan, while a device computes that runs ahead; and for chores
GLANCE_SECONDS = 0.00005
LOOK_SECONDS = 0.001  # between two looks for masks, while there is nothing else to do


class Executor(ThreadActor[Message]):
    """Runs plans in the order in which they come; places and releases adapters between them.

    Everything else is a chore: placing an adapter, and handing memory to and from the KV cache. Chores are
    done in pieces between two steps, for at most `CHORE_SHARE` of the time that the step before took, so that
    they hardly hold up other requests; when there is nothing else to do, all at once. Before an adapter makes
    another one leave, it asks for memory of the KV cache. An adapter that a thread reads into its
    place beside the steps is placed when that thread says so.

    A row whose mask is not made in time sits the step out. The scheduler is told when the mask is there; it
    is looked for after each step, and while there is nothing to do every `LOOK_SECONDS`.

    `build` makes the step engine on this thread: a restart begins with an empty cache. `recorder` gets
    each step before it begins.
    """

    def __init__(
        self,
        build: Callable[[], StepRunner],
        scheduler: Ref[Message],
        store: Ref[Message],
        recorder: StepRecorder,
    ) -> None:
        self._build = build
        self._scheduler = scheduler
        self._store = store
        self._recorder = recorder
        self._borrowing: deque[AdapterTicket] = deque()  # asked for memory, in this order
        self._chores: deque[Iterator[None]] = deque()
        self._owed = 0  # pages that were asked back
        self._wanted = False  # the store was told so
        self._unread: Any = None  # a launched step, in whatever form the device has it
        self._untold: StepFinished | None = None
        self._looking = False  # a `Look` is under way
        self._done = self._gap = self._seconds = 0.0
        self._chored = 0.0  # seconds since the last step
        self._forward = self._sample = self._wait = self._place = 0.0

    def started(self) -> None:
        """Forget what was meant for an earlier epoch; build the engine."""
        while self.try_next() is not None:
            pass
        self._recorder.clear()
        self._engine = self._build()
        self._worker = self._engine.worker

    def receive(self, message: Message) -> None:
        """Run a step, or place or release an adapter; a `Look` has nothing of its own to do."""
        match message:
            case Execute():
                self._execute(message)
            case LoadAdapter(adapter=digest, source=source):
                self._load(digest, source)
            case Lend(pages=pages):
                self._chores.append(self._placing(self._borrowing.popleft(), pages))
            case Repay(count=count):
                self._owed += count
                self._repay()
            case AdapterLoadFailed(adapter=digest, error=error):
                self._worker.discard(digest)
                self._refuse(digest, error)
            case Look():
                self._looking = False
            case Release(adapters=digests):
                self._wanted = False
                for digest in digests:
                    self._worker.release(digest)
                self._repay()
        if self._unread is not None and not self._next_is_here():
            self._read()
        if not self.pending:
            self._tell()
        self._work()
        if self._engine.deferred:
            self._resume()

    def _resume(self) -> None:
        """Have those planned again whose masks are there. What they sat out has to be told first."""
        if self._untold is None and (ids := self._engine.resumable()):
            self.post(self._scheduler, Resumed(ids))
        patience = LOOK_SECONDS
        while not self.pending and patience > 0:
            self.sleep(GLANCE_SECONDS)
            patience -= GLANCE_SECONDS
        if not self.pending and not self._looking:
            self._looking = True
            self.post(self.ref, Look())

    def _work(self) -> None:
        """As much of the chores as is due. What a step brought is told only when they have taken a while:
        telling wakes other threads, and a short chore would then wait behind them for the interpreter."""
        while self._chores and (not self.pending or self._chored < CHORE_SHARE * self._seconds):
            begun, chore = self.time(), self._chores[0]
            if next(chore, self) is self:
                self._chores.remove(chore)  # another may be before it by now
            took = self.time() - begun
            self._chored += took
            self._place += took
            if self._chored >= GRACE_SECONDS:
                self._tell()

    def _next_is_here(self) -> bool:
        """Whether there is something to do before the launched step is read. The next plan is being made from
        the step that has just been told. It is worth waiting for: otherwise the device would be idle from the
        end of this step until that plan is launched."""
        patience = GRACE_SECONDS
        while not self.pending and patience > 0 and not self._engine.ready(self._unread):
            self.sleep(GLANCE_SECONDS)
            patience -= GLANCE_SECONDS
        return self.pending

    def _repay(self) -> None:
        """Begin to hand back what is owed and can be had now; before other chores, as sequences wait."""
        if self._owed and (pages := self._worker.repay(self._owed)):
            self._owed = max(self._owed - len(pages), 0)
            self._chores.appendleft(self._repaying(pages))
            self.post(self._store, AdaptersEvicted(*self._worker.adapter_stats))
        if self._owed and not self._wanted:
            self._wanted = True
            self.post(self._store, MemoryWanted())

    def _repaying(self, pages: tuple[int, ...]) -> Iterator[None]:
        yield from self._worker.giving_back(pages)
        self.post(self._scheduler, Repaid(pages))

    def _load(self, digest: str, source: AdapterSource) -> None:
        """Begin to place an adapter, or ask for memory first."""
        try:
            ticket = self._worker.load_adapter(digest, source)
        except AdapterError as error:
            self._refuse(digest, error.message)
            return
        if missing := ticket.missing:
            self._borrowing.append(ticket)
            self.post(self._scheduler, Borrow(missing))
        else:
            self._chores.append(self._placing(ticket))

    def _refuse(self, digest: str, error: str) -> None:
        self.post(self._store, AdapterLoaded(digest, False, error, *self._worker.adapter_stats))

    def _placing(self, ticket: AdapterTicket, borrowed: tuple[int, ...] = ()) -> Iterator[None]:
        placed, error, kind, arriving = False, None, "RequestFailed", None
        if borrowed:
            yield from self._worker.lending(borrowed)
            self._repay()
        try:
            arriving = yield from ticket.pieces()
            placed = True
        except Overloaded:
            pass
        except AdapterError as refused:
            error, kind = refused.message, "AdapterUnusable"
        answer = AdapterLoaded(ticket.digest, placed, error, *self._worker.adapter_stats, kind)
        if arriving is None:
            self.post(self._store, answer)
        else:
            arriving.add_done_callback(partial(self._arrived, answer))

    def _arrived(self, answer: AdapterLoaded, arriving: Future[None]) -> None:
        """All of an adapter is in its place; the thread that brought it says so."""
        failure = arriving.exception()
        with suppress(ActorStopped):  # whoever asked was told so
            if failure is None:
                self.post(self._store, answer)
            else:
                self.post(self.ref, AdapterLoadFailed(answer.adapter, str(failure)))

    def _execute(self, execute: Execute) -> None:
        begun = self.time()
        waited = self._wait
        self._recorder.begin(execute.plan)
        prepared = self._engine.prepare(execute.plan, execute.grammars)
        self._gap = self.time() - self._done if execute.follows else 0.0
        forward = self._engine.forward(prepared, partial(self._overlap, prepared))
        launched = self.time()
        self._forward += launched - begun - (self._wait - waited)
        self._unread = self._engine.sample(execute.plan, forward)
        now = self.time()
        self._sample += now - launched
        self._seconds = now - begun
        self._chored = 0.0
        if self._engine.runs_ahead:
            self._tell()
        else:
            self._done = now

    def _overlap(self, prepared: Any) -> None:
        """What there is to do while the forward pass runs."""
        if self._unread is not None:
            self._read()
        self._engine.fill(prepared)
        if not self._engine.runs_ahead:
            self._tell()

    def _read(self) -> None:
        assert self._unread is not None
        begun = self.time()
        result = self._engine.finish(self._unread)
        self._unread = None
        self._done = self.time()
        self._wait += self._done - begun
        timings = StepTimings(0.0, self._forward, self._sample, self._wait, self._place)
        self._untold = StepFinished(result, self._seconds, self._gap, timings)
        self._gap = 0.0  # told

    def _tell(self) -> None:
        if self._untold is not None:
            self.post(self._scheduler, self._untold)
            self._untold = None
