"""The executor's actor: one thread that owns the device, its memory and its graphs.

Step N+1 is launched before step N is read, if it is planned by then, so the device does not wait for the
host. `engine/step.py` defines the order.

A step's result is reported when the device has work again and the masks are made, or when there is no work.
Reporting wakes the loop's thread, which then needs the interpreter for almost a millisecond: it commits the
step, plans, and writes to the frontend. Reported earlier, it would take the interpreter while this thread
needs it and the device waits. Reported then, it runs while this thread computes or waits for the device.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Generic

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
    MemoryWanted,
    Message,
    PollMasks,
    RecallPages,
    Release,
    Resumed,
    Return,
    StepFinished,
)
from personae.actors.spec import Computed, Launched, Prepared, StepRunner
from personae.engine.stats import StepTimings
from personae.engine.worker.worker import AdapterTicket
from personae.errors import ActorStopped, AdapterError, Overloaded
from personae.lora.source import AdapterSource

MEMORY_WORK_SHARE = 0.2  # of the last step's time that memory work may take between two steps
GRACE_SECONDS = 0.001  # how long to wait for the next plan; how long memory work may delay a report
POLL_SECONDS = 0.00005
MASK_POLL_SECONDS = 0.001  # between two checks for masks, while there is nothing else to do


class Executor(ThreadActor[Message], Generic[Prepared, Computed, Launched]):
    """Runs plans in the order in which they arrive. Loads and releases adapters between them.

    Loading an adapter, and lending memory to and from the KV cache, is memory work. It is done in pieces
    between two steps, for at most `MEMORY_WORK_SHARE` of the time of the step before, so that it hardly
    delays other requests. If there is nothing else to do, it is done all at once. Before an adapter evicts
    another one, the executor asks for memory of the KV cache. If a thread reads an adapter into its pages
    while steps run, the adapter is loaded when that thread says so.

    A row whose mask is not ready in time is deferred. The scheduler is notified when the mask is ready;
    that is checked after each step, and every `MASK_POLL_SECONDS` while there is nothing to do.

    `build` makes the step engine on this thread, so a restart begins with an empty cache. `recorder` gets
    each step before it begins. The device works on `steps_at_once`: all but the newest of them are read only
    when that has begun.
    """

    def __init__(
        self,
        build: Callable[[], StepRunner[Prepared, Computed, Launched]],
        scheduler: Ref[Message],
        store: Ref[Message],
        recorder: StepRecorder,
        steps_at_once: int = 1,
    ) -> None:
        self._steps_at_once = steps_at_once
        self._build = build
        self._scheduler = scheduler
        self._store = store
        self._recorder = recorder
        self._borrowing: deque[AdapterTicket] = deque()  # adapter loads that wait for memory, in order
        self._memory_work: deque[Iterator[None]] = deque()
        self._recalled = 0  # pages that the scheduler recalled and that are not back yet
        self._memory_wanted = False  # the store was asked for memory
        # The launched steps whose results are not read, and when they began.
        self._in_flight: deque[tuple[Launched, float]] = deque()
        self._ended_at = 0.0  # when the last step of stages was read
        self._unreported: StepFinished | None = None
        self._polling = False  # a `PollMasks` message is on its way
        self._read_at = self._gap = self._seconds = 0.0
        self._memory_work_seconds = 0.0  # seconds of memory work since the last step
        self._forward = self._sample = self._wait = self._place = 0.0

    def started(self) -> None:
        """Drop messages of an earlier epoch; build the engine."""
        while self.try_next() is not None:
            pass
        self._recorder.clear()
        self._engine = self._build()
        self._worker = self._engine.worker

    def receive(self, message: Message) -> None:
        """Run a step, or load or release an adapter. A `PollMasks` message does nothing by itself."""
        match message:
            case Execute():
                self._execute(message)
            case LoadAdapter(adapter=digest, source=source):
                self._load(digest, source)
            case Lend(pages=pages):
                self._memory_work.append(self._placing(self._borrowing.popleft(), pages))
            case RecallPages(count=count):
                self._recalled += count
                self._return()
            case AdapterLoadFailed(adapter=digest, error=error):
                self._worker.discard(digest)
                self._refuse(digest, error)
            case PollMasks():
                self._polling = False
            case Release(adapters=digests):
                self._memory_wanted = False
                for digest in digests:
                    self._worker.release(digest)
                self._return()
        while self._in_flight and not self._next_arrived():
            self._read_step()
            if self._in_flight:
                self._report()
        if self._unreported is not None and not self.pending:
            self._report()
        if self._memory_work:
            self._do_memory_work()
        if self._engine.deferred:
            self._resume()

    def _resume(self) -> None:
        """Have the deferred rows planned again whose masks are ready. The step that deferred them must be
        reported first."""
        if self._unreported is None and (ids := self._engine.resumable()):
            self.post(self._scheduler, Resumed(ids))
        remaining = MASK_POLL_SECONDS
        while not self.pending and remaining > 0:
            self.sleep(POLL_SECONDS)
            remaining -= POLL_SECONDS
        if not self.pending and not self._polling:
            self._polling = True
            self.post(self.ref, PollMasks())

    def _do_memory_work(self) -> None:
        """Do as much memory work as is due. A step is reported only after that has taken a while: reporting
        wakes other threads, and short memory work would then wait behind them for the interpreter."""
        while self._memory_work and (
            not self.pending or self._memory_work_seconds < MEMORY_WORK_SHARE * self._seconds
        ):
            begun, work = self.time(), self._memory_work[0]
            if next(work, self) is self:
                self._memory_work.remove(work)  # not popleft: more urgent work may have come first
            took = self.time() - begun
            self._memory_work_seconds += took
            self._place += took
            if self._memory_work_seconds >= GRACE_SECONDS:
                self._report()

    def _next_arrived(self) -> bool:
        """Wait a little for the next message before the launched step is read. The next plan is being made
        from the step that was just reported. It is worth waiting for: otherwise the device would be idle from
        the end of this step until that plan is launched. Stages compute meanwhile: for them it is worth
        waiting until the step is there."""
        remaining = GRACE_SECONDS if self._steps_at_once == 1 else math.inf
        while not self.pending and remaining > 0 and not self._engine.ready(self._in_flight[0][0]):
            self.sleep(POLL_SECONDS)
            remaining -= POLL_SECONDS
        return self.pending

    def _return(self) -> None:
        """Begin to return the recalled pages that are free now. This goes before other memory work, since
        sequences wait for it."""
        if self._recalled and (pages := self._worker.recall(self._recalled)):
            self._recalled = max(self._recalled - len(pages), 0)
            self._memory_work.appendleft(self._returning(pages))
            self.post(self._store, AdaptersEvicted(*self._worker.adapter_stats))
        if self._recalled and not self._memory_wanted:
            self._memory_wanted = True
            self.post(self._store, MemoryWanted())

    def _returning(self, pages: tuple[int, ...]) -> Iterator[None]:
        yield from self._worker.returning(pages)
        self.post(self._scheduler, Return(pages))

    def _load(self, digest: str, source: AdapterSource) -> None:
        """Begin to load an adapter, or ask for memory first."""
        try:
            ticket = self._worker.load_adapter(digest, source)
        except AdapterError as error:
            self._refuse(digest, error.message)
            return
        if missing := ticket.missing:
            self._borrowing.append(ticket)
            self.post(self._scheduler, Borrow(missing))
        else:
            self._memory_work.append(self._placing(ticket))

    def _refuse(self, digest: str, error: str) -> None:
        self.post(self._store, AdapterLoaded(digest, False, error, *self._worker.adapter_stats))

    def _placing(self, ticket: AdapterTicket, borrowed: tuple[int, ...] = ()) -> Iterator[None]:
        placed, error, kind, arriving = False, None, "RequestFailed", None
        if borrowed:
            yield from self._worker.lending(borrowed)
            self._return()
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
        """An adapter is completely in its pages, as the thread that read it reports."""
        failure = arriving.exception()
        with suppress(ActorStopped):  # the store has stopped
            if failure is None:
                self.post(self._store, answer)
            else:
                self.post(self.ref, AdapterLoadFailed(answer.adapter, str(failure)))

    def _execute(self, execute: Execute) -> None:
        begun = self.time()
        waited = self._wait
        plan, grammars = execute.step.begin()
        self._recorder.begin(plan)
        prepared = self._engine.prepare(plan, grammars)
        self._gap = self.time() - self._read_at if execute.follows else 0.0
        forward = self._engine.forward(prepared, partial(self._overlap, prepared))
        launched = self.time()
        self._forward += launched - begun - (self._wait - waited)
        self._in_flight.append((self._engine.sample(plan, forward), begun))
        now = self.time()
        self._sample += now - launched
        self._seconds = now - begun
        self._memory_work_seconds = 0.0
        if self._engine.runs_ahead:
            self._report()
        else:
            self._read_at = now

    def _overlap(self, prepared: Prepared) -> None:
        """Do the host's work while the forward pass runs."""
        if self._in_flight and len(self._in_flight) >= self._steps_at_once - 1:
            self._read_step()
        self._engine.fill(prepared)
        if not self._engine.runs_ahead:
            self._report()

    def _read_step(self) -> None:
        waits = self.time()
        step, begun = self._in_flight.popleft()
        result = self._engine.finish(step)
        self._read_at = self.time()
        self._wait += self._read_at - waits
        seconds = self._seconds
        if self._steps_at_once > 1:
            seconds = self._read_at - max(begun, self._ended_at)
            self._ended_at = self._read_at
        timings = StepTimings(0.0, self._forward, self._sample, self._wait, self._place)
        self._unreported = StepFinished(result, seconds, self._gap, timings)
        self._gap = 0.0

    def _report(self) -> None:
        if self._unreported is not None:
            self.post(self._scheduler, self._unreported)
            self._unreported = None
