"""Adapters by digest: on disk as many as there are, on the host as many as its memory is meant to hold.

A digest stands for content, so nothing here ever goes stale. A file that has changed under its digest is
refused, not served.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Protocol

from personae.errors import AdapterError
from personae.lora.adapter import Adapter
from personae.lora.mix import mixed
from personae.lora.mix_id import parts_of
from personae.lora.peft import read_adapter
from personae.lora.shapes import LoraShapes
from personae.lora.source import AdapterSource
from personae.lora.stored import find, store
from personae.lora.throttle import Rest, Throttle


class Prepare(Protocol):
    """Gives adapters the form in which the host keeps them."""

    def __call__(self, adapter: Adapter, *, rest: Rest) -> Adapter:
        """`rest` is called every now and then."""


class AdapterFetcher(Protocol):
    """Brings adapters from elsewhere to the folder that a library reads; on any thread."""

    def fetch(self, digest: str, /) -> None:
        """Have its files there. Raises AdapterError when it is nowhere, or there is no room."""

    def used(self, digest: str, /) -> None:
        """It is used now; what was not for longest leaves first."""

    def discard(self, digest: str, /) -> None:
        """What was brought is not what its digest says."""


class AdapterLibrary:
    """Reads adapters from `folder`/digest, or from where `known` says, and keeps the latest used.

    Whoever wants one on the device has it found or read, on any thread, and hands its digest and source to a
    worker, which takes it. At most `cache_bytes` are kept, but always the latest, in the form that `prepare`
    gives them. `stored`: see AdapterBounds; of what can be stored nothing is kept here, and `folder` has a
    file of it as soon as it was read. What is not in `folder` the `fetcher` brings there.
    """

    def __init__(
        self,
        shapes: LoraShapes,
        known: Mapping[str, Path],
        folder: Path | None,
        cache_bytes: int,
        prepare: Prepare | None = None,
        stored: str | None = None,
        fetcher: AdapterFetcher | None = None,
    ) -> None:
        self._shapes = shapes
        self._known = known
        self._folder = folder
        self._cache_bytes = cache_bytes
        self._prepare = prepare
        self._stored = stored
        self._fetcher = fetcher
        self._cache: OrderedDict[str, Adapter] = OrderedDict()
        self._bytes = 0
        self._offered: dict[str, Adapter] = {}  # found or read, and not taken yet
        self._lock = Lock()  # of the cache

    def find(self, digest: str) -> AdapterSource | None:
        """Where the adapter lies, if it is on the host; `take` will ask for it."""
        with self._lock:
            found = self._cache.get(digest)
            if found is None:
                return None
            self._cache.move_to_end(digest)
        self._offered[digest] = found
        return self._source(found)

    @property
    def kept(self) -> tuple[int, int]:
        """Adapters on the host, and their bytes."""
        return len(self._cache), self._bytes

    def read(self, digest: str) -> AdapterSource:
        """Have the adapter on the host, from disk; `take` will ask for it. Raises AdapterError when it is not
        there or not what it was."""
        adapter = self._load(digest, self._folders(digest))
        self.put(adapter)
        self._offered[digest] = adapter
        return self._source(adapter)

    def take(self, digest: str, source: AdapterSource) -> Adapter:
        """The adapter, from the host if it has just been found or read, or is kept; else from its source.
        Raises AdapterError as `read` does."""
        adapter = self._offered.pop(digest, None)
        if adapter is None:
            with self._lock:
                adapter = self._cache.get(digest)
        return self._load(digest, source.folders) if adapter is None else adapter

    def forget_offered(self) -> None:
        """Nobody will `take` what was found or read so far."""
        self._offered.clear()

    def put(self, adapter: Adapter) -> None:
        """Keep an adapter that was read, unless it is still in its file; the least recently used leave."""
        if adapter.stored is not None:
            return
        with self._lock:
            old = self._cache.pop(adapter.digest, None)
            self._cache[adapter.digest] = adapter
            self._bytes += adapter.nbytes - (old.nbytes if old else 0)
            while self._bytes > self._cache_bytes and len(self._cache) > 1:
                self._bytes -= self._cache.popitem(last=False)[1].nbytes

    def _folders(self, digest: str) -> tuple[str, ...]:
        """Of the adapter, or of a mix's parts; none if it is not known where one of them is."""
        parts = parts_of(digest) or [(digest, 1.0)]
        folders = [self._known.get(part) or (self._folder and self._folder / part) for part, _ in parts]
        return tuple(map(str, folders)) if all(folders) else ()

    def _source(self, adapter: Adapter) -> AdapterSource:
        return AdapterSource(self._folders(adapter.digest), adapter.stored is not None)

    def _load(self, digest: str, folders: tuple[str, ...]) -> Adapter:
        """In the form in which the host keeps it. A mix is made of its parts as their files have them."""
        if not folders:
            raise _gone(digest)
        throttle = Throttle()
        parts = parts_of(digest)
        if parts is None:
            kind = None if digest in self._known or self._folder is None else self._stored
            folder = Path(folders[0])
            if self._fetcher is not None:
                self._fetcher.used(digest)
            if kind is not None and (stored := find(folder, digest, self._shapes, kind)) is not None:
                return stored
            adapter = self._read(digest, folder, throttle)
            if kind is not None:
                store(adapter, folder, self._shapes, kind, throttle.rest)
                if (stored := find(folder, digest, self._shapes, kind)) is not None:
                    return stored
        else:
            read = [
                (self._read(part, Path(folder), throttle), weight)
                for (part, weight), folder in zip(parts, folders, strict=True)
            ]
            adapter = mixed(digest, read)
        return adapter if self._prepare is None else self._prepare(adapter, rest=throttle.rest)

    def _read(self, digest: str, folder: Path, throttle: Throttle) -> Adapter:
        fetcher = self._fetcher if digest not in self._known else None
        if fetcher is not None and not folder.is_dir():
            fetcher.fetch(digest)
        if not folder.is_dir():
            raise _gone(digest)
        try:
            adapter = read_adapter(folder, self._shapes, throttle.rest)
        except OSError as error:
            raise AdapterError(f"adapter {digest}: {error.strerror}") from None
        if adapter.digest != digest and fetcher is not None:
            fetcher.discard(digest)
            raise AdapterError(f"adapter {digest}: the files that were brought are not those of its digest")
        if adapter.digest != digest:
            raise AdapterError(f"adapter {folder.name!r}: its files have changed since it was registered")
        return adapter


def _gone(digest: str) -> AdapterError:
    return AdapterError(f"adapter {digest}: it is not there any more")
