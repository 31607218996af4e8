"""Sends the frontend's adapters to engines on other machines, by the digest of their content, never by a
path."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import ByteStream

from personae.actors.cluster.files import (
    DIGEST,
    FILES,
    MAX_FILES_FRAME,
    PIECE,
    AllSent,
    FileBegins,
    FileEnds,
    NotSent,
    Piece,
    Sent,
    Want,
)
from personae.actors.cluster.frames import FrameReader
from personae.actors.framing import frame

log = logging.getLogger("personae.cluster")


class AdapterFiles:
    """Sends the files of adapters: those in `named`, which are known at the start, and those in `store`, by
    digest.

    `keys` has the key of each adapter known at the start. Raises OSError if one of these can't be read.
    """

    def __init__(self, named: Mapping[str, Path], store: Path | None) -> None:
        self.keys = {name: _key_of(folder) for name, folder in named.items()}
        self._folders = {self.keys[name]: folder for name, folder in named.items()}
        self._store = store

    async def serve(self, stream: ByteStream) -> None:
        """Answer one engine's requests until it disconnects."""
        requests: FrameReader[Want] = FrameReader(stream, Want, MAX_FILES_FRAME)
        try:
            async with stream:
                while (request := await requests.next()) is not None:
                    await self._send(request.key, stream)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # it disconnected during an answer

    async def _send(self, key: str, stream: ByteStream) -> None:
        folder = self._folder(key)
        if folder is None:
            await stream.send(frame(NotSent("the frontend does not have it")))
            return
        messages = _file_messages(folder)
        while True:
            try:
                message = await to_thread.run_sync(next, messages, None)
            except OSError as error:
                log.warning("adapter %s can't be read: %s", key, error)
                message = NotSent(f"the frontend can't read it: {error.strerror}")
                messages = iter(())
            if message is None:
                return
            await stream.send(frame(message))

    def _folder(self, key: str) -> Path | None:
        if key in self._folders:
            return self._folders[key]
        if self._store is None or not DIGEST.fullmatch(key):
            return None
        folder = self._store / key
        return folder if folder.is_dir() else None


def _key_of(folder: Path) -> str:
    total = hashlib.sha256(b"personae adapter files 1\n")
    for name in FILES:
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return f"files-{total.hexdigest()}"


def _file_messages(folder: Path) -> Iterator[Sent]:
    """Yield all messages for a folder's files, reading them on the way."""
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue  # the engine that reads the adapter reports what is missing
        with path.open("rb") as file:
            left = path.stat().st_size
            yield FileBegins(name, left)
            sha256 = hashlib.sha256()
            while left and (data := file.read(min(PIECE, left))):
                left -= len(data)
                sha256.update(data)
                yield Piece(data)
            yield FileEnds(sha256.hexdigest())
    yield AllSent()
