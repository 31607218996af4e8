"""Frames: a length of four bytes, little-endian, and a message in msgpack. No pickle, nothing executable.

It imports nothing of the engine, so the small processes that only forward messages need no torch.
"""

from pathlib import Path
from typing import Any, Protocol

import msgspec

from personae.errors import LineBroken

HEADER = 4
MAX_FRAME = 2**30  # bytes; 64 sequences of a million tokens need less


def _plain(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _rich(kind: type, value: Any) -> Any:
    return kind(value)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame."""
    body = encode(message)
    return len(body).to_bytes(HEADER, "little") + body


def decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Make a decoder for the bodies of the given messages (`ToCore`, `ToFrontend`)."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_rich)


def frame_length(data: bytes | bytearray, at: int, limit: int = MAX_FRAME) -> int:
    """The length of the frame whose header begins at `at`, without the header. Raises LineBroken if it
    exceeds `limit`."""
    length = int.from_bytes(data[at : at + HEADER], "little")
    if length > limit:
        raise LineBroken(f"A frame of {length} bytes was announced; the limit is {limit}.")
    return length


class Receiver(Protocol):
    """A socket or a `Line`."""

    def recv(self, count: int, /) -> bytes:
        """Wait for data; empty when the other side has closed."""


def receive_first(line: Receiver, kind: Any, limit: int = MAX_FRAME) -> Any:
    """Wait for one message, blocking. Raises EOFError when the other side has closed."""
    length = frame_length(_exactly(line, HEADER), 0, limit)
    return decoder(kind).decode(_exactly(line, length))


def _exactly(line: Receiver, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (more := line.recv(count - len(data))):
            raise EOFError("the other side has closed the connection")
        data += more
    return bytes(data)
