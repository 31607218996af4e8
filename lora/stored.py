"""Adapters on disk in the form of the host's pool, next to the uploaded files.

The file has the stacks of `stacking.py`. It is written once: when an upload has been checked, or when the
adapter is first needed in another dtype. Placing the adapter then means reading the file into its pages: few
system calls, by a thread in parallel with the steps, without further memory. Checksums verify the data and
the header. The file may be deleted at any time, and is deleted if it is damaged; it is then made from the
upload again.
"""

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personae.errors import AdapterError
from personae.kernels.sgmv import RANK_PAGE
from personae.lora.adapter import Adapter, StackFile, StoredHalf
from personae.lora.disk import check_free
from personae.lora.safetensors_file import DTYPES, SafetensorsFile
from personae.lora.shapes import LoraShapes
from personae.lora.stacking import stacked
from personae.lora.strict_json import decode_object
from personae.lora.throttle import Rest, Throttle, no_rest
from personae.lora.writing import runs

Bytes = NDArray[np.uint8]
Pieces = Generator[None, None, Future[None] | None]
"""The steps of placing an adapter. The last one returns a future if work still runs in parallel."""

Place = tuple[tuple[int, ...], int, int]
"""A tensor in a file: its shape, and where its data begin and end."""

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_SLICE = 2**18  # bytes that are read, written or checksummed between two rests
_PARTS = 1024  # per call: IOV_MAX on Linux


def store(adapter: Adapter, folder: Path, shapes: LoraShapes, kind: str, rest: Rest = no_rest) -> None:
    """Write the adapter's file, if it only has low rank on linear modules, and if the disk has room.

    kind: its dtype, by safetensors' name. `rest` is called regularly.
    """
    if adapter.dora_bias or adapter.vocabulary:
        return
    halves = {
        f"{module}.{half}": tensor
        for module, stack in stacked(adapter, shapes.layers, DTYPES[kind], rest).stacks.items()
        for half, tensor in zip("ab", stack, strict=True)
    }
    path = _path(folder, kind)
    unfinished = path.with_suffix(".part")
    try:
        check_free(folder, stored_bytes(adapter, shapes, kind))
        with unfinished.open("wb") as file:
            file.write(_header(adapter, halves, kind, rest))
            for tensor in halves.values():
                for some in _slices(tensor):
                    rest()
                    file.write(some)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()


def stored_bytes(adapter: Adapter, shapes: LoraShapes, kind: str) -> int:
    """The size of the file that `store` would write, without the header; 0 if it would write none."""
    if adapter.dora_bias or adapter.vocabulary:
        return 0
    elements = sum(rank * sum(shapes.modules[module]) for module, rank in adapter.ranks.items())
    return shapes.layers * elements * DTYPES[kind].itemsize


def find(folder: Path, digest: str | None, shapes: LoraShapes, kind: str) -> Adapter | None:
    """The adapter of that digest (None: of any), with its tensors still in the file; None if there is no such
    file."""
    path = _path(folder, kind)
    try:
        with SafetensorsFile(path) as file:
            notes = _Metadata(decode_object(file.metadata["adapter"].encode(), path.name))
            places = {name: (entry.shape, entry.begin, entry.end) for name, entry in file.entries.items()}
            if file.metadata["checksum"] != _header_checksum(file.metadata["adapter"], places):
                return None
            halves, ranks = {}, {}
            for name, entry in file.entries.items():
                module, half = name.split(".")
                layers, ranks[module], width = entry.shape
                if (layers, width) != (shapes.layers, shapes.modules[module]["ab".index(half)]):
                    return None
                halves[module, half] = StoredHalf(file.data_start + entry.begin, notes.checksums[name])
    except (AdapterError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None
    digest = digest or notes.digest
    if notes.digest != digest or {(m, half) for m in ranks for half in "ab"} != halves.keys():
        return None
    stored = StackFile(path, halves)
    experts = {module: count for module in ranks if (count := shapes.sites[module].experts) > 1}
    return Adapter(
        digest, digest, {}, ranks, notes.peak, 0, invocation=notes.invocation, stored=stored, experts=experts
    )


class _Metadata:
    """A file's metadata about its adapter. Raises LookupError, TypeError or ValueError if something is
    missing."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.digest = str(fields["digest"])
        self.peak = float(fields["peak"])
        self.invocation = tuple(int(token) for token in fields["invocation"])
        self.checksums = {str(name): int(value) for name, value in fields["checksums"].items()}


def finished(pieces: Pieces) -> Future[None] | None:
    """Run all pieces. Returns what the last one returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return cast("Future[None] | None", end.value)


class PageReader:
    """Reads adapters into their pages, on two threads, so that a large one does not delay a small one.

    weight_pools: by module, A's and B's, [groups, layers, pages, RANK_PAGE, width] in the host's memory.
    """

    def __init__(self, weight_pools: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._weight_pools = weight_pools
        self._threads = ThreadPoolExecutor(2, "adapters")

    def begin(
        self, stored: StackFile, pages: Mapping[str, Sequence[int]], ranks: Mapping[str, int]
    ) -> Future[None]:
        """The future is done when everything is read; the rest of a module's last page is zeroed. It fails
        with an AdapterError if the file has changed; then the file is deleted."""
        return self._threads.submit(self._fill, stored, pages, ranks)

    def _fill(self, stored: StackFile, pages: Mapping[str, Sequence[int]], ranks: Mapping[str, int]) -> None:
        throttle = Throttle()
        try:
            file = os.open(stored.path, os.O_RDONLY)
        except OSError as error:
            raise AdapterError(f"{stored.path.name}: {error.strerror}") from None
        try:
            for module, own in pages.items():
                for half, weight_pool in zip("ab", self._weight_pools[module], strict=True):
                    parts, left = _parts(_bytes_of(weight_pool), own, ranks[module])
                    if not _read(file, stored.halves[module, half], parts, throttle.rest):
                        stored.path.unlink(missing_ok=True)
                        raise AdapterError(f"{stored.path.name} has changed since it was written")
                    left[:] = 0
        finally:
            os.close(file)


def _parts(groups: Bytes, pages: Sequence[int], rank: int) -> tuple[list[memoryview], Bytes]:
    """The bytes of these pages in the order of the file, with all ranks of each layer; and the bytes after
    the last rank."""
    count, layers, places = groups.shape[:3]
    rows = groups.reshape(count, layers, places * RANK_PAGE, -1)
    found = []
    left = rank
    for group, first, last in runs(pages, places):
        begin, end = first * RANK_PAGE, last * RANK_PAGE
        middle = min(begin + left, end)
        found.append((group, begin, middle))
        left -= middle - begin
    parts = [rows[group, layer, begin:end].data for layer in range(layers) for group, begin, end in found]
    return parts, rows[group, :, middle:end]


def _read(file: int, half: StoredHalf, parts: list[memoryview], rest: Rest) -> bool:
    """Read consecutive bytes into the parts. Returns whether they match the checksum."""
    offset, checksum = half.offset, 0
    for some in _batches(parts):
        rest()
        size = sum(part.nbytes for part in some)
        if os.preadv(file, some, offset) != size:
            return False
        offset += size
        for part in some:
            checksum = crc32(part, checksum)
    return checksum == half.checksum


def _batches(parts: list[memoryview]) -> Iterator[list[memoryview]]:
    """The parts in batches, each about a slice in size."""
    some: list[memoryview] = []
    size = 0
    for part in parts:
        some.append(part)
        size += part.nbytes
        if len(some) == _PARTS or size >= _SLICE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _slices(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor, in slices."""
    whole = _bytes_of(tensor).reshape(-1).data
    return (whole[begin : begin + _SLICE] for begin in range(0, len(whole), _SLICE))


def _checksum(tensor: Tensor, rest: Rest) -> int:
    checksum = 0
    for some in _slices(tensor):
        rest()
        checksum = crc32(some, checksum)
    return checksum


def _header(adapter: Adapter, halves: Mapping[str, Tensor], kind: str, rest: Rest) -> bytes:
    """The header of a safetensors file, with what else is known about the adapter in its metadata."""
    notes = {
        "digest": adapter.digest,
        "peak": adapter.peak,
        "invocation": adapter.invocation,
        "checksums": {name: _checksum(tensor, rest) for name, tensor in halves.items()},
    }
    places: dict[str, Place] = {}
    end = 0
    for name, tensor in halves.items():
        begin, end = end, end + tensor.nbytes
        places[name] = tuple(tensor.shape), begin, end
    encoded = json.dumps(notes)
    header: dict[str, Any] = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        for name, (shape, begin, end) in places.items()
    }
    header["__metadata__"] = {"adapter": encoded, "checksum": _header_checksum(encoded, places)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def _header_checksum(notes: str, places: Mapping[str, Place]) -> str:
    return str(crc32(f"{notes} {sorted(places.items())}".encode()))


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.view(torch.uint8).numpy()


def _path(folder: Path, kind: str) -> Path:
    return folder / f"stacks.{kind}.safetensors"
