"""Limits how many sequences of batches may be in the engine at once."""

import anyio


class SequenceSemaphore:
    """`size` places, given out in the order of the requests for them."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._turn = anyio.Lock()
        self._freed = anyio.Event()

    async def take(self, places: int) -> int:
        """Wait for so many places, or for all if there are fewer. Returns how many were taken."""
        places = min(places, self._size)
        async with self._turn:
            while self._left < places:
                self._freed = anyio.Event()
                await self._freed.wait()
            self._left -= places
        return places

    def give(self, places: int) -> None:
        """Return places."""
        self._left += places
        self._freed.set()
