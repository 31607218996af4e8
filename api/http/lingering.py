"""The end of a connection whose client may still be sending.

If a socket is closed while it has bytes that nobody read, the system resets the connection. The client then
loses an answer that it has not read yet. So the server ends its own side first, reads and discards what
comes, and closes when the client has closed: for a limited time and a limited number of bytes.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LONGEST_SILENCE = 5.0
"""Seconds without a byte, after which a client is not waited for."""


class LingeringTransport(asyncio.Transport):
    """The transport of a connection. `close` waits for the client if `may_send` says that it may be sending:
    at most `seconds`, and until it has sent `most` bytes more."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        may_send: Callable[[], bool],
        *,
        seconds: float,
        most: int,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._may_send = may_send
        self._seconds = seconds
        self._left = most
        self._timer: asyncio.TimerHandle | None = None
        self._until = self._heard = 0.0
        self.lingers = False

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        """As `asyncio.Transport`, as all that follows unless it says something else."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether `close` or `abort` was called, or the connection is lost."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, and close. While it lingers: close now."""
        if self.is_closing() or not self._may_send():
            self.close_now()
            return
        self.lingers = True
        if self._transport.can_write_eof():  # TLS cannot: its clients know the answer's length
            self._transport.write_eof()
        self._transport.resume_reading()
        self._heard = self._loop.time()
        self._until = self._heard + self._seconds
        self._check()

    def close_now(self) -> None:
        """Close without waiting for the client."""
        self.lingers = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.close()

    def discard(self, data: bytes) -> None:
        """These bytes came while it lingers."""
        self._heard = self._loop.time()
        self._left -= len(data)
        if self._left < 0:
            self.close_now()

    def _check(self) -> None:
        due = min(self._until, self._heard + LONGEST_SILENCE)
        if self._loop.time() >= due:
            self.close_now()
        else:
            self._timer = self._loop.call_at(due, self._check)

    def abort(self) -> None:
        """Close, and drop what was written."""
        self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the connection under this name."""
        return self._transport.get_extra_info(name, default)

    def is_reading(self) -> bool:
        """Whether it reads."""
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()
