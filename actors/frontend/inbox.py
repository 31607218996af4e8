"""Holds a client's deltas until it reads them: the streamer fills it, the request's own task drains it.

A reader gets everything that arrived since its last read at once. So a slow client costs memory for its own
tokens (bounded by max_tokens) and nothing else.
"""

from personae.actors.kit.signal import Signal
from personae.engine.sequence import Delta


class Inbox:
    """The deltas of one submission's sequences, in order. It has a single reader; `put` never waits."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._arrived = Signal()

    def put(self, delta: Delta) -> None:
        """Add a delta."""
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
