"""A way for the parts of a stream past ASGI's `send`, which costs several calls for each."""

from typing import Protocol

FLOW = "personae.flow"
"""The key of a connection's `Flow` in the extensions of an ASGI scope, if the server has put one there."""


class Flow(Protocol):
    """A connection whose answer has begun and has no length."""

    @property
    def write_paused(self) -> bool:
        """Whether the client reads more slowly than is written. Then only `send` may be used, which waits."""

    def write(self, body: bytes) -> None:
        """Send the next part of the answer, in this turn of the event loop or the next."""

    def flush(self) -> None:
        """Send now what was written. To be called before `send`, which sends at once."""
