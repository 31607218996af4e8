"""Holds a client's deltas until it reads them: the streamer fills it, the request's own task drains it.

A reader gets everything that arrived since its last read at once. So a slow client costs memory for its own
tokens (bounded by max_tokens) and nothing else.

Most deltas need nothing that waits. A reader that sleeps need not wake for those: it has a function that
takes them as they arrive.
"""

from collections.abc import Callable

from personae.actors.kit.signal import Signal
from personae.engine.sequence import Delta


class Inbox:
    """The deltas of one submission's sequences, in order. It has a single reader; `put` never waits."""

    __slots__ = ("_arrived", "_deltas", "_error", "at_once")

    def __init__(self) -> None:
        self.at_once: Callable[[Delta], bool] | None = None
        """Takes a delta in the reader's place while it sleeps. It returns False for one that the reader must
        take itself, and must not have done anything with it. What it raises ends the stream."""
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._arrived = Signal()

    def put(self, delta: Delta) -> None:
        """Add a delta. Nothing follows an error."""
        if self._error is not None:
            return
        if self.at_once is not None and self._arrived.awaited:
            try:
                if self.at_once(delta):
                    return
            except Exception as error:
                self.fail(error)
                return
        self._deltas.append(delta)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream: the reader gets the deltas that are left, then this error."""
        if self._error is None:
            self._error = error
        self._arrived.set()

    async def get(self) -> list[Delta]:
        """Wait for at least one delta and return all that arrived. Raises the error that ended the stream."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            await self._arrived.wait()
        deltas, self._deltas = self._deltas, []
        return deltas
