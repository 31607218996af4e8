"""Calls into an event loop from another thread, the same on asyncio, uvloop and trio.

AnyIO's own bridge (`anyio.from_thread`) returns a result, so it needs a worker thread or a portal and blocks
until the loop has run the call. The executor must not wait for the loop: it posts a result and launches the
next step. Both loops have a one-way call for that (`call_soon_threadsafe`, `run_sync_soon`), and only this
module uses them. Threads also start here, so that a loop may bring threads of its own: those of a simulation
take turns with the loop, on a virtual clock.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import current_token

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Wakeup(Protocol):
    """What a thread sleeps on. `put` adds a token; `get` takes one, and waits until there is one."""

    def get(self) -> None:
        """Take a token. Waits until there is one."""

    def put(self, item: None) -> None:
        """Add a token. Any thread may call it."""


class Thread(Protocol):
    """A thread that has been started."""

    def join(self) -> None:
        """Wait for its end."""


class Threads:
    """Starts a loop's threads, and gives the time on them."""

    time: Callable[[], float] = staticmethod(time.perf_counter)
    """Returns a time in seconds, for differences. Any thread may call it."""

    def sleep(self, seconds: float) -> None:
        """Sleep. Called on one of the threads."""
        time.sleep(seconds)

    def wakeup(self) -> Wakeup:
        """Make a wakeup without a token."""
        return queue.SimpleQueue[None]()

    def start(self, target: Callable[[], object], name: str) -> Thread:
        """Run `target` on a thread of its own, a daemon thread."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    async def call(self, function: Callable[[*Args], T], *args: *Args, limiter: CapacityLimiter) -> T:
        """Run `function(*args)` on a worker thread, as many at a time as the limiter allows."""
        return await to_thread.run_sync(function, *args, limiter=limiter)


THREADS = Threads()


class Loop:
    """A handle of the running event loop that callbacks and other threads can use. `thread` is the identity
    of the loop's own thread.

    `time()` is the loop's clock in seconds, the one that `anyio.current_time` reads. Unlike that function, it
    also works in plain callbacks, where no task is current.
    """

    __slots__ = ("_call_soon", "thread", "threads", "time")

    def __init__(
        self, time: Callable[[], float], call_soon: Callable[..., object], threads: Threads = THREADS
    ) -> None:
        self.time = time
        self.threads = threads
        self._call_soon = call_soon
        self.thread = threading.get_ident()

    @classmethod
    def current(cls) -> "Loop":
        """Return the loop that runs the caller's task. Raises RuntimeError outside of one."""
        token = current_token()
        native: Any = token.native_token
        if hasattr(native, "call_soon_threadsafe"):  # an asyncio loop, uvloop's included
            return cls(native.time, native.call_soon_threadsafe, getattr(native, "threads", THREADS))
        return cls(token.backend_class.current_time, native.run_sync_soon)  # a TrioToken

    def call_soon(self, function: Callable[[*Args], object], *args: *Args) -> bool:
        """Run `function(*args)` on the loop soon, in the order of the calls. Any thread may call it; it never
        waits.

        Returns False if the loop has ended and nothing will run. `function` must not raise: nothing would
        catch it.
        """
        try:
            self._call_soon(function, *args)
        except RuntimeError:
            return False
        return True
