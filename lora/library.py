"""Adapters by digest: on disk as many as there are, on the host as many as its memory is meant to hold.

A digest stands for content, so nothing here ever goes stale. A file that has changed under its digest is
refused, not served.
"""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from personae.errors import AdapterError
from personae.lora.adapter import Adapter, LoraShapes
from personae.lora.mix import mixed, parts_of
from personae.lora.peft import read_adapter
from personae.lora.stored import find, store
from personae.lora.throttle import Rest, Throttle


class Prepare(Protocol):
    """Gives adapters the form in which the host keeps them."""

    def __call__(self, adapter: Adapter, *, rest: Rest) -> Adapter:
        """`rest` is called every now and then."""


class AdapterLibrary:
    """Reads adapters from `folder`/digest, or from where `known` says, and keeps the latest used.

    `read` may run on any thread; the others belong to one. At most `cache_bytes` are kept, but always the
    latest, in the form that `prepare` gives them. `stored`: see AdapterBounds; of what can be stored nothing
    is kept here, and `folder` has a file of it as soon as it was read.
    """

    def __init__(
        self,
        shapes: LoraShapes,
        known: Mapping[str, Path],
        folder: Path | None,
        cache_bytes: int,
        prepare: Prepare | None = None,
        stored: str | None = None,
    ) -> None:
        self._shapes = shapes
        self._known = known
        self._folder = folder
        self._cache_bytes = cache_bytes
        self._prepare = prepare
        self._stored = stored
        self._cache: OrderedDict[str, Adapter] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str) -> Adapter | None:
        """The adapter if it is on the host."""
        if digest in self._cache:
            self._cache.move_to_end(digest)
        return self._cache.get(digest)

    @property
    def kept(self) -> tuple[int, int]:
        """Adapters on the host, and their bytes."""
        return len(self._cache), self._bytes

    def read(self, digest: str) -> Adapter:
        """The adapter from disk. Raises AdapterError when it is not there or not what it was.

        A mix is made of its parts as their files have them.
        """
        throttle = Throttle()
        parts = parts_of(digest)
        if parts is None:
            if (stored := self._find(digest)) is not None:
                return stored
            adapter = self._read(digest, throttle)
            if (stored := self._store(adapter, throttle)) is not None:
                return stored
        else:
            adapter = mixed(digest, [(self._read(part, throttle), weight) for part, weight in parts])
        return adapter if self._prepare is None else self._prepare(adapter, rest=throttle.rest)

    def _find(self, digest: str) -> Adapter | None:
        if self._stored is None or self._folder is None or digest in self._known:
            return None
        return find(self._folder / digest, digest, self._shapes, self._stored)

    def _store(self, adapter: Adapter, throttle: Throttle) -> Adapter | None:
        """The adapter from a file that is written now, where it may be."""
        if self._stored is None or self._folder is None or adapter.digest in self._known:
            return None
        store(adapter, self._folder / adapter.digest, self._shapes, self._stored, throttle.rest)
        return self._find(adapter.digest)

    def _read(self, digest: str, throttle: Throttle) -> Adapter:
        folder = self._known.get(digest) or (self._folder and self._folder / digest)
        if folder is None or not folder.is_dir():
            raise AdapterError(f"adapter {digest}: it is not there any more")
        try:
            adapter = read_adapter(folder, self._shapes, throttle.rest)
        except OSError as error:
            raise AdapterError(f"adapter {digest}: {error.strerror}") from None
        if adapter.digest != digest:
            raise AdapterError(f"adapter {folder.name!r}: its files have changed since it was registered")
        return adapter

    def put(self, adapter: Adapter) -> None:
        """Keep an adapter that was read, unless it is still in its file; the least recently used leave."""
        if adapter.stored is not None:
            return
        old = self._cache.pop(adapter.digest, None)
        self._cache[adapter.digest] = adapter
        self._bytes += adapter.nbytes - (old.nbytes if old else 0)
        while self._bytes > self._cache_bytes and len(self._cache) > 1:
            self._bytes -= self._cache.popitem(last=False)[1].nbytes
