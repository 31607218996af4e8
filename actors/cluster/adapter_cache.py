"""An engine's adapters on its own machine's disk, downloaded from the frontend on first use.

    CACHE/DIGEST/            an adapter that was added later, by the digest of its content
    CACHE/files-SHA256/      an adapter known at the start, by the digest of its files

Engines on one machine share the folder. When an adapter needs room, the least recently used ones are removed.
The adapters that an engine has from its start are locked while it lives. A folder always appears complete: it
is written under another name and then renamed.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

from personae.actors.cluster.contact import Contact
from personae.actors.cluster.files import (
    DIGEST,
    FILES,
    MAX_FILES_FRAME,
    START_KEY,
    AllSent,
    FileBegins,
    FileEnds,
    NotSent,
    Piece,
    Sent,
    Want,
)
from personae.actors.framing import frame, receive_first
from personae.actors.line import Line
from personae.actors.options import EngineOptions
from personae.errors import AdapterError, LineBroken, LoadError
from personae.kernels.cache_folder import cache_folder
from personae.kernels.sizes import size_text
from personae.lora.disk import check_free

ANSWER_SECONDS = 60.0  # how long the frontend may pause while it sends
_UNFINISHED = ".brought-"
_STALE_SECONDS = 3600.0


def default_cache() -> Path:
    """The folder for adapters if none is configured."""
    return cache_folder() / "adapters"


class AdapterCache:
    """Implements `lora.library.AdapterFetcher`. `line` is the connection for requests to the frontend."""

    def __init__(self, contact: Contact, line: Line) -> None:
        self._contact = contact
        self._line = line
        self._downloading = Lock()  # one adapter is downloaded at a time
        self._folder = Path(contact.cache) if contact.cache is not None else default_cache()
        self._locks: list[int] = []  # open files of folders that must not be removed

    def provide(self, options: EngineOptions) -> EngineOptions:
        """Return the engine's options for this machine: the adapters known at the start are in the cache, and
        where the other stages are. Raises LoadError if an adapter cannot be downloaded."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            named = tuple((name, self._hold(key)) for name, key in self._contact.adapters.items())
        except OSError as error:
            raise LoadError(f"The folder for adapters, {self._folder}, can't be used: {error}") from None
        return replace(
            options,
            named_adapters=named,
            adapter_store=self._folder,
            share=self._contact.share,
            far_stages=self._contact.far_stages,
        )

    def _publish(self, unfinished: Path, folder: Path) -> None:
        """Rename the folder, unless another engine was faster."""
        os.chmod(unfinished, 0o755)  # noqa: S103  as any other folder
        try:
            unfinished.rename(folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not folder.is_dir():
                raise

    def fetch(self, digest: str) -> None:
        """Download an adapter's files. Raises AdapterError if the frontend does not have it, the files are
        damaged, or there is no room; OSError if the frontend does not answer."""
        if not (DIGEST.fullmatch(digest) or START_KEY.fullmatch(digest)):
            raise AdapterError(f"adapter {digest[:80]!r} is not a digest")
        with self._downloading:
            if (self._folder / digest).is_dir():
                return  # another thread has downloaded it meanwhile
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._folder))
            try:
                self._download(digest, unfinished)
                self._publish(unfinished, self._folder / digest)
            except OSError as error:
                if isinstance(error, ConnectionError | TimeoutError):
                    raise
                raise AdapterError(f"adapter {digest}: {self._folder}: {error.strerror}") from None
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def used(self, digest: str) -> None:
        """Note that the adapter is used now."""
        with suppress(OSError):
            os.utime(self._folder / digest)

    def discard(self, digest: str) -> None:
        """Remove an adapter whose files do not match its digest."""
        shutil.rmtree(self._folder / digest, ignore_errors=True)

    def _hold(self, key: str) -> Path:
        """Return the folder of an adapter, locked as long as this process lives."""
        folder = self._folder / key
        for _ in range(3):
            if not folder.is_dir():
                self.fetch(key)
            try:
                lock = os.open(folder, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_SH)
            except FileNotFoundError:
                continue  # it was just removed
            if folder.is_dir():
                self._locks.append(lock)
                self.used(key)
                return folder
            os.close(lock)
        raise LoadError(
            f"Adapter {key} is removed from {self._folder} at once; --adapter-cache-size is too small."
        )

    def _download(self, key: str, folder: Path) -> None:
        self._line.settimeout(ANSWER_SECONDS)
        self._line.sendall(frame(Want(key)))
        problem: str | None = None
        expected = set(FILES)
        while True:
            message: Sent = self._receive_message()
            match message:
                case FileBegins(name=name, size=size):
                    if name not in expected:
                        raise LineBroken("The frontend sends a file that was not requested.")
                    expected.remove(name)
                    problem = problem or self._make_room(size)
                    problem = self._receive_file(None if problem else folder / name, size) or problem
                case AllSent():
                    break
                case NotSent(why=why):
                    problem = why
                    break
                case Piece() | FileEnds():
                    raise LineBroken("The frontend sends data outside of a file.")
        if problem is not None:
            raise AdapterError(f"adapter {key}: {problem}")

    def _receive_file(self, path: Path | None, size: int) -> str | None:
        """Write one file, or skip it if `path` is None. Returns the problem with it, if any."""
        sha256, got, problem = hashlib.sha256(), 0, None
        with open(path or os.devnull, "wb") as file:
            while True:
                message: Sent = self._receive_message()
                match message:
                    case Piece(data=data):
                        got += len(data)
                        if got > size:
                            raise LineBroken("The frontend sends more bytes than it announced.")
                        sha256.update(data)
                        try:
                            if problem is None:
                                file.write(data)
                        except OSError as error:
                            problem = f"it can't be written here: {error.strerror}"
                    case FileEnds(sha256=expected):
                        if got != size or sha256.hexdigest() != expected:
                            return "it was damaged in transit, or changed while it was read"
                        return problem
                    case NotSent(why=why):
                        raise AdapterError(why)
                    case _:
                        raise LineBroken("The frontend begins another file before this one ends.")

    def _receive_message(self) -> Sent:
        try:
            message: Sent = receive_first(self._line, Sent, MAX_FILES_FRAME)
        except EOFError:
            raise ConnectionResetError("The frontend has gone") from None
        return message

    def _make_room(self, size: int) -> str | None:
        """Make room for `size` more bytes. Returns why that is impossible, if it is."""
        bound = self._contact.cache_bytes
        kept = sorted(
            (_used_at(folder), folder) for folder in self._folder.iterdir() if _is_removable(folder)
        )
        sizes = {folder: _size(folder) for folder in self._folder.iterdir()}
        total = sum(sizes.values())
        for _, folder in kept:
            if total + size <= bound:
                break
            if _remove(folder):
                total -= sizes.get(folder, 0)
        if total + size > bound:
            return f"{self._folder} may hold {size_text(bound)}, and the adapter does not fit"
        try:
            check_free(self._folder, size)
        except OSError:
            return f"the disk of {self._folder} is full"
        return None


def _is_removable(folder: Path) -> bool:
    """Whether it is an adapter, or an unfinished download of an engine that died."""
    if folder.name.startswith(_UNFINISHED):
        return time.time() - _used_at(folder) > _STALE_SECONDS
    return bool(DIGEST.fullmatch(folder.name) or START_KEY.fullmatch(folder.name))


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0  # it was just removed


def _size(folder: Path) -> int:
    with suppress(OSError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
    return 0  # it was just removed


def _remove(folder: Path) -> bool:
    """Remove a folder, unless an engine holds it. Returns whether it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
