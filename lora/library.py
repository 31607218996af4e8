"""Adapters by digest: all of them on disk, and as many on the host as its memory is meant to hold.

A digest identifies content, so nothing here becomes stale. A file that has changed under its digest is
rejected.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Protocol

from personae.errors import AdapterError
from personae.kernels.malloc import give_back_freed
from personae.lora.adapter import Adapter
from personae.lora.mix import mixed
from personae.lora.mix_id import parts_of
from personae.lora.peft import read_adapter
from personae.lora.shapes import LoraShapes
from personae.lora.source import AdapterSource
from personae.lora.stored import find, store
from personae.lora.throttle import Rest, Throttle


class Prepare(Protocol):
    """Converts adapters to the form in which the host keeps them."""

    def __call__(self, adapter: Adapter, *, rest: Rest) -> Adapter:
        """`rest` is called regularly."""


class AdapterFetcher(Protocol):
    """Fetches adapters from elsewhere to the folder that a library reads. Any thread may call it."""

    def fetch(self, digest: str, /) -> None:
        """Put its files there. Raises AdapterError if it cannot be found, or if there is no room."""

    def used(self, digest: str, /) -> None:
        """It is being used: the least recently used is evicted first."""

    def discard(self, digest: str, /) -> None:
        """The fetched files do not match their digest."""


class AdapterLibrary:
    """Reads adapters from `folder`/digest, or from the paths in `known`, and caches the most recently used.

    To load an adapter to the device, any thread has it found or read here, and passes its digest and source
    to a worker, which takes it. The cache keeps at most `cache_bytes`, but always the latest adapter, in the
    form that `prepare` returns. `stored`: see AdapterBounds; adapters that can be stored are not cached here,
    and `folder` has a file of each as soon as it was read. The `fetcher` fetches adapters that are not in
    `folder`. `kept` has folders with such a file of adapters in `known`.
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
        kept: Mapping[str, Path] | None = None,
    ) -> None:
        self._shapes = shapes
        self._known = known
        self._folder = folder
        self._cache_bytes = cache_bytes
        self._prepare = prepare
        self._stored = stored
        self._fetcher = fetcher
        self._kept = kept or {}
        self._cache: OrderedDict[str, Adapter] = OrderedDict()
        self._bytes = 0
        self._offered: dict[str, Adapter] = {}  # found or read, but not taken yet
        self._lock = Lock()  # guards the cache

    def find(self, digest: str) -> AdapterSource | None:
        """The source of an adapter that is on the host, which `take` can then take. None if it is not."""
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
        """Read an adapter from disk, which `take` can then take. Raises AdapterError if it does not exist or
        has changed."""
        adapter = self._load(digest, self._folders(digest))
        self.put(adapter)
        self._offered[digest] = adapter
        return self._source(adapter)

    def take(self, digest: str, source: AdapterSource) -> Adapter:
        """The adapter, from the host if it was just found or read or is cached; otherwise from its source.
        Raises AdapterError as `read` does."""
        adapter = self._offered.pop(digest, None)
        if adapter is None:
            with self._lock:
                adapter = self._cache.get(digest)
        return self._load(digest, source.folders) if adapter is None else adapter

    def placed(self, digest: str) -> None:
        """The device has the adapter. If the device's memory is the host's, the copy here is dropped: it is
        read again when it is needed. A mix is kept, because making it again takes long."""
        if self._stored is not None and parts_of(digest) is None:
            with self._lock:
                dropped = self._cache.pop(digest, None)
                self._bytes -= dropped.nbytes if dropped else 0
            if dropped is not None:
                del dropped
                give_back_freed()

    def forget_offered(self) -> None:
        """Nothing that was found or read so far will be taken."""
        self._offered.clear()

    def put(self, adapter: Adapter) -> None:
        """Cache an adapter that was read, unless it is stored in a file, and evict the least recently used
        ones."""
        if adapter.stored is not None:
            return
        with self._lock:
            old = self._cache.pop(adapter.digest, None)
            self._cache[adapter.digest] = adapter
            self._bytes += adapter.nbytes - (old.nbytes if old else 0)
            while self._bytes > self._cache_bytes and len(self._cache) > 1:
                self._bytes -= self._cache.popitem(last=False)[1].nbytes

    def _folders(self, digest: str) -> tuple[str, ...]:
        """The folder of the adapter, or of each part of a mix; empty if one of them is unknown."""
        parts = parts_of(digest) or [(digest, 1.0)]
        folders = [self._known.get(part) or (self._folder and self._folder / part) for part, _ in parts]
        return tuple(map(str, folders)) if all(folders) else ()

    def _source(self, adapter: Adapter) -> AdapterSource:
        return AdapterSource(self._folders(adapter.digest), adapter.stored is not None)

    def _load(self, digest: str, folders: tuple[str, ...]) -> Adapter:
        """Read it in the form in which the host keeps it. A mix is made from its parts' files."""
        if not folders:
            raise _missing(digest)
        throttle = Throttle()
        parts = parts_of(digest)
        if parts is None:
            if (there := self._kept_file(digest)) is not None:
                return there
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

    def _kept_file(self, digest: str) -> Adapter | None:
        place = self._kept.get(digest)
        if place is None or self._stored is None:
            return None
        return find(place, digest, self._shapes, self._stored)

    def _read(self, digest: str, folder: Path, throttle: Throttle) -> Adapter:
        fetcher = self._fetcher if digest not in self._known else None
        if fetcher is not None and not folder.is_dir():
            fetcher.fetch(digest)
        if not folder.is_dir():
            raise _missing(digest)
        try:
            adapter = read_adapter(folder, self._shapes, throttle.rest)
        except OSError as error:
            raise AdapterError(f"adapter {digest}: {error.strerror}") from None
        if adapter.digest != digest and fetcher is not None:
            fetcher.discard(digest)
            raise AdapterError(f"adapter {digest}: the fetched files do not match its digest")
        if adapter.digest != digest:
            raise AdapterError(f"adapter {folder.name!r}: its files have changed since it was registered")
        return adapter


def _missing(digest: str) -> AdapterError:
    return AdapterError(f"adapter {digest}: its files no longer exist")
