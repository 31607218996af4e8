"""What one task sleeps on until another wakes it; unlike anyio's `Event` it can be used again and again.

A stream sleeps and wakes for every token. On asyncio that takes a future here, and no look at which library
runs the loop.
"""

import asyncio

import anyio


class Signal:
    """Wakes the task that waits. It remembers nothing: before a task waits it sees whether there is anything
    to wait for. At most one task waits."""

    __slots__ = ("_event", "_future", "awaited")

    def __init__(self) -> None:
        self.awaited = False  # a task waits and has not been woken
        self._future: asyncio.Future[None] | None = None
        self._event: anyio.Event | None = None  # on trio

    def set(self) -> None:
        """Wake the task that waits, if one does."""
        self.awaited = False
        if self._future is not None:
            if not self._future.done():  # woken already, or cancelled
                self._future.set_result(None)
        elif self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Sleep until `set` is called."""
        self.awaited = True
        try:
            await self._woken()
        finally:  # also when it is cancelled
            self.awaited = False

    async def _woken(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._event = anyio.Event()
            await self._event.wait()
            return
        self._future = loop.create_future()
        await self._future
