"""An event loop with virtual time and an order that follows from a seed.

    with asyncio.Runner(loop_factory=lambda: SimulationLoop(seed)) as runner:
        runner.run(main())

- *Time* stands still while anything can run, then jumps to the next timer. Computing takes no time; code that
  is to take time calls `threads.sleep`.
- *Order.* A number made from the seed, the task and how often it has run decides which of the ready tasks
  goes next. So the order depends neither on when they became ready, nor on memory addresses or the seed of
  `hash(str)`: a seed replays exactly, on any machine. Plain callbacks keep their order: asyncio promises it,
  and the kit relies on it.
- *Threads* are greenlets that take turns with the loop. A thread gives up its turn only when it sleeps or
  waits for its wakeup. So actors with a thread of their own run unchanged. (Real threads that hand over a
  lock would work too, but would spend most of their time waiting for the operating system.)

Nothing here knows of actors or of Personae.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from anyio import CapacityLimiter
from greenlet import greenlet

from personae.actors.kit.bridge import Threads

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Deadlock(AssertionError):
    """Every task waits and no timer is set."""


class _Step(asyncio.Task[Any]):
    """A task that knows its number and how often it has been ready."""

    __slots__ = ("number", "turns")
    number: int
    turns: int


class SimulationLoop(asyncio.BaseEventLoop):
    """Created with a seed. `steps` counts what has run; `after_step`, if set, is called after each step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.steps = 0
        self.after_step: Callable[[], None] | None = None
        self.threads = SimulationThreads(self)
        self._now = 0.0
        self._plain: deque[asyncio.Handle] = deque()
        self._heap: list[tuple[int, int, asyncio.Handle]] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tasks_made = self._timers_set = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # typeshed also wants generators

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(  # type: ignore[override]  # the same, less precisely
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Queue a callback. The seed orders the steps of tasks; everything else runs in order of the
        calls."""
        handle = asyncio.Handle(callback, args, self, context)
        owner = getattr(callback, "__self__", None)
        if type(owner) is _Step:
            owner.turns += 1
            self._push(owner.number, owner.turns, handle)
        else:
            self._plain.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # at any time only one thread runs

    def call_at(  # type: ignore[override]  # the same, less precisely
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer. Timers of one moment run in the order in which they were set."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def call_step(self, number: int, turn: int, callback: Callable[[], object]) -> None:
        """Run a callback in the order of the seed, as if it were a task's step."""
        self._push(number, turn, asyncio.Handle(callback, (), self, None))

    def next_number(self) -> int:
        """Return a number for a new participant in the order."""
        self._tasks_made += 1
        return self._tasks_made

    def _push(self, number: int, turn: int, handle: asyncio.Handle) -> None:
        heapq.heappush(self._heap, (hash((self.seed, number, turn)), number, handle))

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        # The constructor schedules the first step, so the number must be set before it runs.
        task = _Step.__new__(_Step)
        task.number, task.turns = self.next_number(), 0
        task.__init__(coroutine, loop=loop, context=context)  # type: ignore[misc]  # see above
        return task

    def _run_once(self) -> None:
        plain, heap = self._plain, self._heap
        if not plain and not heap:
            self._wait()
        while (plain or heap) and not self._stopping:  # type: ignore[attr-defined]  # BaseEventLoop's
            for _ in range(len(plain)):  # callbacks that these add run next time, so tasks do not starve
                handle = plain.popleft()
                if not handle._cancelled:
                    handle._run()
            if heap:
                handle = heapq.heappop(heap)[2]
                if not handle._cancelled:
                    handle._run()
                    self.steps += 1
                    if self.after_step is not None:
                        self.after_step()

    def _wait(self) -> None:
        """Jump to the next timer."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock("every task waits and no timer is set")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._plain.append(heapq.heappop(timers)[2])

    # Methods that BaseEventLoop leaves to loops with a selector.

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...


class _Killed(BaseException):
    """Raised in a thread that must end."""


class SimulationThread:
    """Stands for a thread: a coroutine with a stack of its own, which takes turns with the loop."""

    def __init__(self, loop: SimulationLoop, target: Callable[[], object], owner: object) -> None:
        self.owner = owner
        self._loop = loop
        self._target = target
        self._number = loop.next_number()
        self._turns = 0
        self._greenlet = greenlet(self._main)
        self.soon()

    def soon(self) -> None:
        """Schedule a turn."""
        self._turns += 1
        self._loop.call_step(self._number, self._turns, self._turn)

    def _turn(self) -> None:
        """Run it until it waits."""
        if not self._greenlet.dead:
            self._loop.threads.running = self
            self._greenlet.switch()
            self._loop.threads.running = None

    def wait(self) -> None:
        """Give up the turn. The thread itself calls this."""
        self._loop.threads.running = None
        self._greenlet.parent.switch()
        self._loop.threads.running = self

    def kill(self) -> None:
        """Unwind it now, from where it waits."""
        if self._greenlet:  # has begun, and has not ended
            self._greenlet.throw(_Killed)
        self._target = _nothing

    def join(self) -> None:
        """Do nothing: it has given up its last turn by itself."""

    def _main(self) -> None:
        with suppress(_Killed):
            self._target()


def _nothing() -> None: ...


class _Wakeup:
    """A count of tokens. A thread that waits for one gives up its turn."""

    __slots__ = ("_threads", "_tokens", "_waiting")

    def __init__(self, threads: "SimulationThreads") -> None:
        self._threads = threads
        self._tokens = 0
        self._waiting: SimulationThread | None = None

    def put(self, item: None) -> None:
        self._tokens += 1
        if self._waiting is not None:
            self._waiting.soon()
            self._waiting = None

    def get(self) -> None:
        while not self._tokens:
            self._waiting = self._threads.running
            assert self._waiting is not None, "only a thread may wait for a wakeup"
            self._waiting.wait()
        self._tokens -= 1


class SimulationThreads(Threads):
    """The threads of a `SimulationLoop`. Worker calls run at once, and take the time that they sleep.

    A thread belongs to the `owner` of the task that started it.
    """

    def __init__(self, loop: SimulationLoop) -> None:
        self.running: SimulationThread | None = None
        self.owner: contextvars.ContextVar[object] = contextvars.ContextVar("owner", default=None)
        self._loop = loop
        self._started: list[SimulationThread] = []
        self._slept = 0.0  # seconds that the running worker call has slept

    def time(self) -> float:
        """Return virtual seconds."""
        return self._loop.time() + self._slept

    def wakeup(self) -> _Wakeup:
        """Make a wakeup without a token."""
        return _Wakeup(self)

    def start(self, target: Callable[[], object], name: str) -> SimulationThread:
        """Start a thread."""
        thread = SimulationThread(self._loop, target, self.owner.get())
        self._started.append(thread)
        return thread

    def kill(self, owner: object) -> None:
        """End all threads of an owner, wherever they wait."""
        owned = [thread for thread in self._started if thread.owner is owner]
        self._started = [thread for thread in self._started if thread.owner is not owner]
        for thread in owned:
            thread.kill()

    def sleep(self, seconds: float) -> None:
        """Take time. Called by a thread, or by a function that runs on a worker."""
        thread = self.running
        if thread is None:
            self._slept += seconds
        else:
            self._loop.call_later(seconds, thread.soon)
            thread.wait()

    def sleep_for_ever(self) -> None:
        """Never return. Called by a thread."""
        assert self.running is not None
        while True:
            self.running.wait()

    async def call(self, function: Callable[[*Args], T], *args: *Args, limiter: CapacityLimiter) -> T:
        """Run a function, then wait as long as it has slept. Only then return its result, or raise its
        error."""
        async with limiter:
            try:
                return function(*args)
            finally:
                slept, self._slept = self._slept, 0.0
                await asyncio.sleep(slept)
