"""Reads a GGUF file's header without trusting it: every length is checked against the rest of the file.

The package `gguf` provides the format's numbers, names and arithmetic. Its own reader trusts the header, and
makes an array for each string of the vocabulary.
"""

import mmap
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from personae.errors import ModelLoadError, as_json

VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
_LONGEST_NAME = 2**16
_LEAST_FIELD, _LEAST_TENSOR = 13, 24  # the fewest bytes of an entry
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is [outputs, inputs], as elsewhere. `start`: where its bytes
    begin in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of strings that are in UTF-8. It stays in the file, because a vocabulary's takes megabytes as
    Python's strings."""

    memory: mmap.mmap
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self) -> list[str]:
        """The strings."""
        found, at, memory = [], self.start, self.memory
        for _ in range(self.count):
            (length,) = _length_at(memory, at)
            at += 8 + length
            found.append(memory[at - length : at].decode())
        return found

    def places(self, wanted: Collection[str]) -> list[int]:
        """Where the strings are some of the `wanted` ones, in order."""
        found, at, memory = [], self.start, self.memory
        spelled = {text.encode() for text in wanted}
        lengths = {len(text) for text in spelled}
        for place in range(self.count):
            (length,) = _length_at(memory, at)
            at += 8 + length
            if length in lengths and memory[at - length : at] in spelled:
                found.append(place)
        return found


_length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from


def _end_of_texts(memory: mmap.mmap, start: int, count: int) -> int:
    """Where `count` strings end. Raises EOFError if the file ends before, and UnicodeDecodeError. It does
    without a call per string: a vocabulary has hundreds of thousands."""
    at, end = start, len(memory)
    for _ in range(count):
        if at + 8 > end:
            raise EOFError
        (length,) = _length_at(memory, at)
        at += 8 + length
    if at > end:
        raise EOFError
    try:
        memory[start:at].decode()  # with the lengths: those below 128 are characters that cut no other
    except UnicodeDecodeError:
        Texts(memory, start, count).read()
    return at


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata as Python values (arrays of numbers as numpy's, of strings as `Texts`), and the tensors by
    name, in the file's order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    memory: mmap.mmap

    def bytes_of(self, tensor: TensorInfo) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """A tensor's bytes, without a copy."""
        return np.frombuffer(self.memory, np.uint8, tensor.bytes, tensor.start)


def read_header(path: Path) -> Header:
    """Reads the header of one file. Raises ModelLoadError, which says what is wrong."""
    try:
        with path.open("rb") as file:
            if file.read(4) != struct.pack("<I", GGUF_MAGIC):
                raise ModelLoadError(f"{path.name} is not a GGUF file: it does not begin with 'GGUF'")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}") from None
    cursor = _Cursor(memory, path.name)
    version = cursor.number("<u4")
    if version & 0xFFFF == 0:
        raise cursor.error("is big-endian, which is not supported")
    if version not in VERSIONS:
        raise cursor.error(
            f"is GGUF version {version}; versions {' and '.join(map(str, VERSIONS))} are supported"
        )
    tensors, fields = cursor.count(_LEAST_TENSOR, "tensors"), cursor.count(_LEAST_FIELD, "metadata fields")
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise cursor.error(f"has the metadata field {key} twice")
        metadata[key] = cursor.value(key)
    table = [cursor.tensor() for _ in range(tensors)]
    return Header(path, metadata, _placed(table, metadata, cursor), memory)


def _placed(
    table: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]],
    metadata: dict[str, Any],
    cursor: "_Cursor",
) -> dict[str, TensorInfo]:
    """The tensors with their places in the file. They must follow one another, as they are written, so that
    no two overlap."""
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"has general.alignment {as_json(alignment)}, which is not a power of two")
    start, end = _padded(cursor.at, alignment), len(cursor.memory)
    place, found = 0, dict[str, TensorInfo]()
    for name, shape, type_, offset in table:
        elements, size = GGML_QUANT_SIZES[type_]
        if shape[-1] % elements:
            raise cursor.error(
                f"says that {name} has rows of {shape[-1]}, not a multiple of {type_.name}'s {elements}"
            )
        if name in found:
            raise cursor.error(f"has the tensor {name} twice")
        if offset != place:
            raise cursor.error(
                f"says that {name} begins at {offset}, but the tensors before it end at {place}"
            )
        used = prod(shape) // elements * size
        if start + place + used > end:
            raise cursor.error(
                f"ends at {end} bytes, but {name} ends at {start + place + used}; is the download complete?"
            )
        found[name] = TensorInfo(name, shape, type_, start + place, used)
        place = _padded(place + used, alignment)
    return found


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class _Cursor:
    """A position in a file, which advances as values are read."""

    def __init__(self, memory: mmap.mmap, name: str) -> None:
        self.memory = memory
        self.at = 4
        self._name = name

    def error(self, why: str) -> ModelLoadError:
        """An error about the file, for the caller to raise."""
        return ModelLoadError(f"{self._name} {why}")

    def take(self, size: int, what: str) -> int:
        """Advances by `size` bytes. Returns where they begin."""
        begin = self.at
        if size > len(self.memory) - begin:
            raise self.error(f"ends within {what}; is the download complete?")
        self.at += size
        return begin

    def number(self, kind: str, what: str = "its header") -> Any:
        """A number of numpy's type `kind`."""
        begin = self.take(np.dtype(kind).itemsize, what)
        return np.frombuffer(self.memory, kind, 1, begin)[0].item()

    def count(self, least: int, what: str) -> int:
        """The number of entries that have at least `least` bytes each."""
        found: int = self.number("<u8")
        if found > (len(self.memory) - self.at) // least:
            raise self.error(
                f"is too small for the {found} {what} that it claims to have; is the download complete?"
            )
        return found

    def name(self, what: str) -> str:
        """A string that is a name."""
        length = self.number("<u8", what)
        if length > _LONGEST_NAME:
            raise self.error(f"has {what} of {length} bytes")
        found = self.text(length, what)
        if not found.isprintable():
            raise self.error(f"has {what} that cannot be printed: {as_json(found[:80])}")
        return found

    def text(self, length: int, what: str) -> str:
        """The next `length` bytes as text."""
        begin = self.take(length, what)
        try:
            return self.memory[begin : self.at].decode()
        except UnicodeDecodeError:
            raise self.error(f"has {what} that is not UTF-8") from None

    def value(self, key: str) -> Any:
        """A metadata field's value, after its type."""
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            return self.text(self.number("<u8", key), key)
        if kind is not GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind], key)
        return self._array(key)

    def _array(self, key: str) -> Any:
        kind, length = self._kind(key), self.number("<u8", key)
        if kind is GGUFValueType.ARRAY:
            raise self.error(f"has arrays within the array {key}, which is not supported")
        if kind is not GGUFValueType.STRING:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.memory, dtype, length, self.take(length * dtype.itemsize, key))
        if length > (len(self.memory) - self.at) // 8:
            raise self.error(f"is too small for the {length} strings of {key}; is the download complete?")
        return self._strings(length, key)

    def _strings(self, count: int, key: str) -> Texts:
        found = Texts(self.memory, self.at, count)
        try:
            self.at = _end_of_texts(self.memory, self.at, count)
        except EOFError:
            raise self.error(f"ends within {key}; is the download complete?") from None
        except UnicodeDecodeError:
            raise self.error(f"has a string in {key} that is not UTF-8") from None
        return found

    def _kind(self, key: str) -> GGUFValueType:
        number = self.number("<u4", key)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.error(f"has a value of the unknown type {number} in {key}") from None

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """An entry of the tensor table: name, shape, type, offset."""
        name = self.name("a tensor's name")
        dimensions = self.number("<u4", name)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self.error(f"says that {name} has {dimensions} dimensions")
        shape = tuple(reversed([self.number("<u8", name) for _ in range(dimensions)]))
        if not all(shape):
            raise self.error(f"says that {name} has the shape {list(shape)}")
        number = self.number("<u4", name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.error(f"says that {name} has the unknown type {number}") from None
        return name, shape, kind, self.number("<u8", name)
