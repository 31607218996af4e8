"""Reads frames one by one, for connections with few of them."""

from typing import Any, Generic, TypeVar

import anyio
import msgspec
from anyio.abc import ByteStream

from personae.actors.framing import HEADER, decoder, frame_length
from personae.errors import LineBroken

T = TypeVar("T")
_CHUNK = 2**18


class FrameReader(Generic[T]):
    """Reads messages of one kind from a connection. Cancelling a read loses nothing. A frame of more than
    `limit` bytes, or one with an invalid message, ends the stream."""

    def __init__(self, line: ByteStream, kind: Any, limit: int) -> None:
        self._line = line
        self._decode = decoder(kind).decode
        self._limit = limit
        self._data = bytearray()

    async def next(self) -> T | None:
        """Return the next message; None when the other side has closed, or sent something invalid."""
        try:
            await self._fill(HEADER)
            end = HEADER + frame_length(self._data, 0, self._limit)
            await self._fill(end)
            message: T = self._decode(self._data[HEADER:end])
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return None
        except (msgspec.MsgspecError, LineBroken):
            return None
        del self._data[:end]
        return message

    async def _fill(self, size: int) -> None:
        while len(self._data) < size:
            self._data += await self._line.receive(_CHUNK)
