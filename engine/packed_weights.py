"""Packed weights of models that were loaded before: one file each, which the next start maps.

A start that maps them reads, converts, checks and packs nothing, and all engines of a machine share one copy.

A file has the model's memory (`kernels/mappable.py`) as it lies, then a header, then a trailer with the
header's size and checksum. It is written under another name, and gets its own when all of it is on the disk.
So a file of that name is whole. It is used if its size, its header's checksum and the identity in it are
right. The identity says everything that decides the bytes: the model's files, what was asked for, the layout,
and the code that reads and packs.

Whatever fails is logged in one sentence, and the weights are loaded as without this.
"""

import hashlib
import logging
import os
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from personae.kernels.mappable import MappableMemory, padded
from personae.kernels.sizes import size_text
from personae.lora.disk import check_free
from personae.lora.shapes import Fingerprint

LEAST_BYTES = 4 * 2**20  # smaller models are packed in no time
_MAGIC = b"personaP"
_TRAILER = struct.Struct("<8sQ32s")  # the magic, the header's size, its sha256
_MOST_HEADER = 2**24  # bytes
_WRITTEN_AT_ONCE = 64 * 2**20  # bytes
_SUFFIX, _UNFINISHED = ".weights", ".writing-"
_STALE_SECONDS = 3600.0  # after which a file that nobody has written to is no longer being written
_CODE = (
    "checkpoints",
    "layers",
    "models",
    "quantization",
    "loader.py",
    "../kernels/cpu",
    Path(__file__).name,
)

_log = logging.getLogger("personae.engine")


class _Header(msgspec.Struct, frozen=True):
    identity: str
    memory: int  # bytes
    fingerprints: dict[str, Fingerprint]


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Weights that were packed before. `fingerprints`: see `Decoder`."""

    memory: MappableMemory
    fingerprints: Mapping[str, Fingerprint]


class PackedWeights:
    """Keeps packed weights in `folder`, at most `bound` bytes of them: the least recently used go first.
    `shared`: other engines of this machine use the same weights. `waits`: this process does not compute yet.
    Until `settle` it has no copy of its own, and does not read what is not in memory."""

    def __init__(self, folder: Path, bound: int, *, shared: bool = False, waits: bool = False) -> None:
        self._folder, self._bound, self._shared, self._waits = folder, bound, shared, waits
        self._writing: list[threading.Thread] = []
        self._mapped: list[MappableMemory] = []  # while it waits
        self._lock = threading.Lock()  # guards both

    def keeps(self, size: int) -> bool:
        """Whether weights of `size` bytes are worth a file, and may have one."""
        if size > self._bound:
            _log.info(
                "the packed weights take %s, more than --packed-weights-size; each start packs them again",
                size_text(size, needed=True),
            )
        return LEAST_BYTES <= size <= self._bound

    def find(self, identity: str, size: int) -> KeptWeights | None:
        """The weights of that identity and size; None if there is no whole file of them."""
        path = self._path(identity)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _log.warning("the packed weights in %s cannot be read and are packed again: %s", path, error)
            return None
        try:
            header = _read_header(file)
            if header is None or header.identity != identity or header.memory != size:
                _log.warning("%s is damaged; the weights are packed again", path)
                with suppress(OSError):
                    path.unlink()
                return None
            memory = MappableMemory(size)
            memory.map(file)
        except OSError as error:
            _log.warning("the packed weights in %s cannot be read and are packed again: %s", path, error)
            return None
        finally:
            os.close(file)
        with suppress(OSError):  # a folder that can only be read; then nothing is deleted there, either
            os.utime(path)
        self._settle_on_a_thread(memory)
        _log.info("packed weights: %s from %s", size_text(size, needed=True), path)
        return KeptWeights(memory, header.fingerprints)

    def keep(self, identity: str, memory: MappableMemory, fingerprints: Mapping[str, Fingerprint]) -> None:
        """Write them to their file, on a thread, and map that afterwards if it is shared. Nothing may write
        to `memory` any more."""
        header = _Header(identity, memory.bytes.nbytes, dict(fingerprints))
        writing = threading.Thread(
            target=self._keep, args=(header, memory), name="packed-weights", daemon=True
        )
        self._writing.append(writing)
        writing.start()

    def settle(self) -> None:
        """This process computes from now on."""
        with self._lock:
            self._waits = False
            mapped, self._mapped = self._mapped, []
        for memory in mapped:
            self._settle_on_a_thread(memory)

    def written(self) -> None:
        """Wait until what `keep` was given is in its file, or could not be written."""
        for writing in self._writing:
            writing.join()

    def _keep(self, header: _Header, memory: MappableMemory) -> None:
        path = self._path(header.identity)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            encoded = msgspec.json.encode(header)
            size = padded(header.memory) + len(encoded) + _TRAILER.size
            self._make_room(size)
            check_free(self._folder, size)
            with tempfile.NamedTemporaryFile(prefix=_UNFINISHED, dir=self._folder) as file:
                _write(file.fileno(), header.memory, encoded, memory)
                with suppress(FileExistsError):  # another engine was first; its file has the same bytes
                    os.link(file.name, path)
            if self._shared or self._waits:
                self._map(path, header, memory)
        except OSError as error:
            _log.warning("the packed weights are not kept in %s: %s", self._folder, error)
            return
        _log.info(
            "packed weights: kept %s in %s for the next start (--packed-weights-size 0 keeps none)",
            size_text(header.memory, needed=True),
            path,
        )

    def _map(self, path: Path, header: _Header, memory: MappableMemory) -> None:
        """Let the file, which this engine or another has written, take the memory's place."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _read_header(file) == header:
                memory.map(file)
                self._settle(memory)
        finally:
            os.close(file)

    def _settle_on_a_thread(self, memory: MappableMemory) -> None:
        threading.Thread(target=self._settle, args=(memory,), name="packed-weights", daemon=True).start()

    def _settle(self, memory: MappableMemory) -> None:
        with self._lock:
            if self._waits:
                self._mapped.append(memory)
                return
        try:
            memory.settle(shared=self._shared)
        except OSError as error:
            _log.warning("the packed weights are on small pages, which are slower: %s", error)

    def _path(self, identity: str) -> Path:
        return self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}{_SUFFIX}"

    def _make_room(self, size: int) -> None:
        """Delete unfinished files of processes that ended, and the least recently used weights, until `size`
        more bytes keep within the bound."""
        there: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another engine deleted it
                found = path.stat()
                if path.name.startswith(_UNFINISHED) and found.st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()
                elif path.suffix == _SUFFIX:
                    there.append((found.st_mtime, found.st_size, path))
        total = size + sum(taken for _, taken, _ in there)
        for _, taken, path in sorted(there):
            if total > self._bound:
                path.unlink(missing_ok=True)
                total -= taken


def _write(file: int, size: int, header: bytes, memory: MappableMemory) -> None:
    """Write a whole file to the disk."""
    data = memory.bytes.numpy().data
    for start in range(0, size, _WRITTEN_AT_ONCE):
        part = data[start : start + _WRITTEN_AT_ONCE]
        while part:
            part = part[os.write(file, part) :]
    os.ftruncate(file, padded(size))
    os.lseek(file, padded(size), os.SEEK_SET)
    os.write(file, header + _TRAILER.pack(_MAGIC, len(header), hashlib.sha256(header).digest()))
    os.fsync(file)


def _read_header(file: int) -> _Header | None:
    """The header of a file; None if the file is not whole. Raises OSError."""
    size = os.fstat(file).st_size
    if size < _TRAILER.size:
        return None
    magic, length, checksum = _TRAILER.unpack(os.pread(file, _TRAILER.size, size - _TRAILER.size))
    start = size - _TRAILER.size - length
    if magic != _MAGIC or length > _MOST_HEADER or start < 0:
        return None
    encoded = os.pread(file, length, start)
    if hashlib.sha256(encoded).digest() != checksum:
        return None
    try:
        header = msgspec.json.decode(encoded, type=_Header)
    except msgspec.DecodeError:
        return None
    return header if padded(header.memory) == start else None


def file_facts(files: list[Path]) -> str:
    """What distinguishes files from others of the same names, without reading them. Raises OSError."""
    facts = ((path.name, path.stat()) for path in files)
    return repr([(name, found.st_size, found.st_mtime_ns, found.st_ctime_ns) for name, found in facts])


@cache
def code_digest() -> str:
    """The digest of the code that reads, converts and packs weights, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    here = Path(__file__).parent
    for name in _CODE:
        top = here / name
        paths = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in paths:
            if path.suffix in (".py", ".h", ".cpp"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
