"""Frames: a length, four bytes little-endian, and a message in msgpack. No pickle, nothing that runs.

It imports nothing of the engine: the small processes that only pass messages on need no torch.
"""

from pathlib import Path
from typing import Any, Protocol

import msgspec

from personae.errors import LineBroken

HEADER = 4
MAX_FRAME = 2**30  # bytes; 64 sequences of a million tokens have less


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not cross")


def _rich(kind: type, value: Any) -> Any:
    return kind(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the line."""
    body = _encode(message)
    return len(body).to_bytes(HEADER, "little") + body


def decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Reads the body of frames of the given messages (`ToCore`, `ToFrontend`)."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_rich)


def frame_length(data: bytes | bytearray, at: int, limit: int = MAX_FRAME) -> int:
    """Of the frame whose header begins at `at`, without the header. Raises LineBroken if it is too long to be
    one."""
    length = int.from_bytes(data[at : at + HEADER], "little")
    if length > limit:
        raise LineBroken(f"A frame of {length} bytes was announced; at most {limit} are read.")
    return length


class Receiver(Protocol):
    """A socket, or a line."""

    def recv(self, count: int, /) -> bytes:
        """Wait for data; empty when the other side has gone."""


def receive_first(line: Receiver, kind: Any, limit: int = MAX_FRAME) -> Any:
    """Wait for one message, where there is no loop. Raises EOFError when the other side has gone."""
    length = frame_length(_exactly(line, HEADER), 0, limit)
    return decoder(kind).decode(_exactly(line, length))


def _exactly(line: Receiver, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (more := line.recv(count - len(data))):
            raise EOFError("the other side has gone")
        data += more
    return bytes(data)
