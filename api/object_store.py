"""An object store that several servers share: the contents of adapters and files.

    PREFIX/adapters/DIGEST/manifest.json      {"adapter_model.safetensors": {"size": …, "sha256": …}, …}
    PREFIX/adapters/DIGEST/adapter_model.safetensors
    PREFIX/files/ID/manifest.json
    PREFIX/files/ID/content

The manifest is written last, so what has one is complete. Blocking; for threads.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from personae.engine.object_stores import open_store, reason
from personae.errors import LoadError, StorageFailed
from personae.lora.disk import check_free

_MANIFEST = "manifest.json"
_MOST_MANIFEST = 2**16  # bytes
RETRIES = 3


class _Entry(msgspec.Struct):
    size: int
    sha256: str


_decode = msgspec.json.Decoder(dict[str, _Entry]).decode


class ObjectStore:
    """The store at `url`. Raises LoadError if it cannot be written or read, with the reason."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore import exceptions
        except ImportError as error:
            raise LoadError(f"--object-store needs obstore (pip install obstore): {error}.") from None
        self._api: Any = obstore
        self._failures = (exceptions.BaseError, OSError)
        try:
            self._store: Any = open_store(url, RETRIES)
            probe = f"probe-{secrets.token_hex(8)}"
            obstore.put(self._store, probe, b"personae")
            obstore.delete(self._store, probe)
        except (*self._failures, ValueError) as error:
            raise LoadError(f"--object-store {url} cannot be used: {reason(error)}.") from None

    def put(self, name: str, files: Mapping[str, Path]) -> None:
        """Store files under a name. Raises StorageFailed."""
        manifest = {}
        with self._working():
            for each, path in files.items():
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                manifest[each] = _Entry(path.stat().st_size, digest)
                self._api.put(self._store, f"{name}/{each}", path)
            self._api.put(self._store, f"{name}/{_MANIFEST}", msgspec.json.encode(manifest))

    def has(self, name: str) -> bool:
        """Whether everything of that name is there. Raises StorageFailed."""
        with self._working():
            try:
                self._api.head(self._store, f"{name}/{_MANIFEST}")
            except FileNotFoundError:
                return False
            return True

    def get(self, name: str, folder: Path) -> None:
        """Put the files of that name into a folder, which is then on the disk whole or not at all.

        Raises StorageFailed if they are not there or damaged, or if the store or the disk fails.
        """
        unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        try:
            with self._working():
                unfinished.mkdir()
                for each, entry in self._manifest(name).items():
                    self._download(f"{name}/{each}", unfinished / each, entry)
                if not folder.is_dir():
                    unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Delete what is stored under a name, if anything is. Raises StorageFailed."""
        with self._working():
            try:
                manifest = self._manifest(name)
            except StorageFailed:
                return
            for each in (_MANIFEST, *manifest):
                self._api.delete(self._store, f"{name}/{each}")

    def _manifest(self, name: str) -> dict[str, _Entry]:
        try:
            data = bytes(self._api.get_range(self._store, f"{name}/{_MANIFEST}", start=0, end=_MOST_MANIFEST))
            entries = _decode(data)
            if any("/" in each or each.startswith(".") for each in entries):
                raise msgspec.DecodeError(f"{name} has a path in it")
            return entries
        except FileNotFoundError:
            raise StorageFailed(f"The object store has no {name}.") from None
        except msgspec.DecodeError:
            raise StorageFailed(f"The object store's {name} is damaged.") from None

    def _download(self, key: str, path: Path, entry: _Entry) -> None:
        sha256, size = hashlib.sha256(), 0
        check_free(path.parent, entry.size)
        try:
            found = self._api.get(self._store, key)
        except FileNotFoundError:
            raise StorageFailed(f"The object store's {key} is missing.") from None
        with path.open("xb") as file:
            for piece in found.stream():
                size += len(piece)
                if size > entry.size:
                    break
                sha256.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if size != entry.size or sha256.hexdigest() != entry.sha256:
            raise StorageFailed(f"The object store's {key} is damaged.")

    @contextmanager
    def _working(self) -> Iterator[None]:
        try:
            yield
        except StorageFailed:
            raise
        except self._failures as error:
            raise StorageFailed(f"The object store failed: {reason(error)}. Try again later.") from error
