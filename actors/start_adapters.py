"""Reads the adapters that a server starts with, and keeps what it read for the next start.

An adapter is kept as uploads are: in the form of the host's pool (`lora/stored.py`). The next start then
checks and converts nothing, and reads an adapter's data when a request needs it. What is kept is used if the
adapter's files are the same as before, by their sizes and times, and so are the base's shapes and the code.
It may be deleted at any time.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Thread
from time import sleep, time

import torch

from personae.engine.packed_weights import file_facts
from personae.errors import AdapterError
from personae.kernels.sizes import size_text
from personae.lora.adapter import Adapter
from personae.lora.bounds import AdapterBounds
from personae.lora.fit import check_fit
from personae.lora.peft import read_adapter
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE
from personae.lora.shapes import LoraShapes
from personae.lora.stored import find, store, stored_bytes
from personae.lora.throttle import Throttle

KEPT_BYTES = 2 * 2**30  # of all adapters that are kept; the least recently used go first
LATER_SECONDS = 3.0  # after which what was read is written: a server has started by then
_UNFINISHED, _STALE_SECONDS = ".writing-", 3600.0

log = logging.getLogger("personae.engine")


class KeptAdapters:
    """Adapters in `folder`, at most `bound` bytes of them, for a base of these shapes. `kind`: the dtype of
    its pool, by safetensors' name. `folders` has the place of each that was found, by digest."""

    def __init__(self, folder: Path, shapes: LoraShapes, kind: str, bound: int = KEPT_BYTES) -> None:
        self._folder, self._shapes, self._kind, self._bound = folder, shapes, kind, bound
        facts = kind, shapes.layers, sorted(shapes.sites.items()), shapes.vocabulary, shapes.refusal
        self._fits = f"{facts} {_code_digest()}"
        self._new: list[tuple[Path, Adapter]] = []
        self._bytes = 0
        self.folders: dict[str, Path] = {}

    def read(self, source: Path) -> Adapter:
        """The adapter in the folder `source`: as it was kept, else read. Raises AdapterError as
        `read_adapter` does."""
        place = self._place(source)
        if place is not None and (found := find(place, None, self._shapes, self._kind)) is not None:
            with suppress(OSError):  # a folder that can only be read
                os.utime(place)
            self.folders[found.digest] = place
            self._bytes += stored_bytes(found, self._shapes, self._kind)
            return replace(found, name=source.name)
        adapter = read_adapter(source, self._shapes)
        size = stored_bytes(adapter, self._shapes, self._kind)
        if place is not None and size and self._bytes + size <= self._bound:
            self._bytes += size
            self._new.append((place, adapter))
        return adapter

    def write_later(self, bounds: AdapterBounds) -> None:
        """Do what `write` does, on a thread, when the server has started."""
        if self._new:
            Thread(target=self._write_later, args=(bounds,), name="adapters-kept", daemon=True).start()

    def _write_later(self, bounds: AdapterBounds) -> None:
        sleep(LATER_SECONDS)
        self.write(bounds)

    def write(self, bounds: AdapterBounds) -> None:
        """Write what was read and is within the `bounds`. Others stay as they are, because a refusal names
        their tensors."""
        new, self._new = self._new, []
        for place, adapter in new:
            try:
                check_fit(adapter, bounds)
                self._write(place, adapter)
            except AdapterError:
                continue
            except OSError as error:
                log.warning("the adapter %s is not kept in %s: %s", adapter.name, place, error)
                return

    def _write(self, place: Path, adapter: Adapter) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(stored_bytes(adapter, self._shapes, self._kind))
        made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._folder))
        try:
            store(adapter, made, self._shapes, self._kind, Throttle().rest)
            if find(made, adapter.digest, self._shapes, self._kind) is None:
                free = size_text(shutil.disk_usage(made).free)
                raise OSError(f"it could not be written; {free} are free there")
            shutil.rmtree(place, ignore_errors=True)  # damaged, or of another engine, which has the same
            with suppress(OSError):  # another engine was first
                made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _make_room(self, size: int) -> None:
        """Delete what a process that ended has left unfinished, and the least recently used, until `size`
        more bytes keep within the bound."""
        there: list[tuple[float, int, Path]] = []
        for place in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another engine deleted it
                taken, used = sum(file.stat().st_size for file in place.iterdir()), place.stat().st_mtime
                if place.name.startswith(_UNFINISHED) and used < time() - _STALE_SECONDS:
                    shutil.rmtree(place, ignore_errors=True)
                else:
                    there.append((used, taken, place))
        total = size + sum(taken for _, taken, _ in there)
        for _, taken, place in sorted(there):
            if total > self._bound:
                shutil.rmtree(place, ignore_errors=True)
                total -= taken

    def _place(self, source: Path) -> Path | None:
        """Where an adapter is kept; None if its files cannot be seen."""
        try:
            facts = file_facts([source / CONFIG_FILE, source / TENSORS_FILE])
        except OSError:
            return None
        identity = f"{source.resolve()} {facts} {self._fits}"
        return self._folder / hashlib.sha256(identity.encode()).hexdigest()[:32]


def read_start_adapters(
    folders: Mapping[str, Path], shapes: LoraShapes, kept: KeptAdapters | None = None
) -> dict[str, Adapter]:
    """The adapters by name. Raises AdapterError that names the folder, since there may be many."""
    adapters = {}
    for name, folder in folders.items():
        try:
            adapters[name] = read_adapter(folder, shapes) if kept is None else kept.read(folder)
        except AdapterError as error:
            raise AdapterError(f"adapter {folder}: {error.message}") from error
    return adapters


@cache
def _code_digest() -> str:
    """The digest of the code that reads and converts adapters, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(store.__code__.co_filename).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
