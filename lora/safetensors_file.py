"""Reads untrusted safetensors files (https://huggingface.co/docs/safetensors, "Format").

The file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes. The header is
trusted only after it has been checked against itself and the file: its length, unique names, offsets that
cover the data without gap or overlap, sizes that match dtype and shape. Nothing is allocated before that.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from personae.errors import AdapterError, as_json
from personae.lora.peft_names import refusal
from personae.lora.single import from_float8, magnitude
from personae.lora.strict_json import decode_object
from personae.lora.throttle import Rest, no_rest

MAX_HEADER = 4 * 2**20  # bytes; seven modules of 128 layers need 0.3 MB
MAX_NAME = 256  # characters of a tensor's name
MAX_DIMS = 8
MAX_COUNT = 2**48  # of a size or an offset
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READ = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn}  # the last only on disk: bfloat16 has all of its values


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header describes it. `begin` and `end` count from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open safetensors file of float tensors with a checked header; a context manager.

    `rest` is called before each tensor. `entries` count from `data_start`; `metadata` is unchecked. Raises
    AdapterError, with the tensor's name if there is one, if the file is not valid.
    """

    def __init__(self, path: Path, rest: Rest = no_rest) -> None:
        if not path.is_file():
            raise AdapterError(f"{path.name}: the adapter's folder has no such file")
        self.name = path.name
        self._rest = rest
        self._file = path.open("rb")
        try:
            self.data_start, self.entries, self.metadata = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, name: str) -> Tensor:
        """The tensor of that name, which must not be empty, on the CPU. Its dtype is the file's, or bfloat16
        for float8."""
        self._rest()
        entry = self.entries[name]
        data = bytearray(entry.end - entry.begin)
        self._file.seek(self.data_start + entry.begin)
        if self._file.readinto(data) != len(data):
            raise AdapterError(f"{self.name}: {name!r} is cut short", param=name)
        flat = (
            from_float8(data)
            if entry.dtype == torch.float8_e4m3fn
            else torch.frombuffer(data, dtype=entry.dtype)
        )
        return flat.view(entry.shape)

    def read_checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `read`. Raises AdapterError if the shape differs or a value is not finite."""
        self.check_shape(name, shape)
        return self.read_finite(name)

    def read_finite(self, name: str) -> Tensor:
        """As `read`. Raises AdapterError if a value is not finite."""
        tensor = self.read(name)
        if not math.isfinite(magnitude(tensor)):
            raise refusal(name, "it has values that are not finite")
        return tensor

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises AdapterError if the tensor has another shape."""
        found = self.entries[name].shape
        if found != shape:
            raise refusal(name, f"its shape is {list(found)}; the base and the config need {list(shape)}")

    def _read_header(self) -> tuple[int, dict[str, TensorEntry], Any]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise AdapterError(
                f"{self.name}: a file of {size} bytes cannot have a header of {length} bytes "
                f"(at most {MAX_HEADER}); it is not a safetensors file, or it is cut short",
                param=self.name,
            )
        header = decode_object(self._file.read(length), f"{self.name}: the header")
        metadata = header.pop("__metadata__", None)
        entries = {name: self._entry(name, described) for name, described in header.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                raise AdapterError(
                    f"{self.name}: {name!r} begins at byte {entry.begin} of the data, not at {end} where the "
                    "tensor before it ends",
                    param=name,
                )
            end = entry.end
        if end != size - 8 - length:
            raise AdapterError(
                f"{self.name}: the header describes {end} bytes of data, the file has {size - 8 - length}",
                param=self.name,
            )
        return 8 + length, entries, metadata

    def _entry(self, name: str, described: Any) -> TensorEntry:
        if len(name) > MAX_NAME:
            raise AdapterError(
                f"{self.name}: a tensor's name has {len(name)} characters; at most {MAX_NAME}",
                param=self.name,
            )
        if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
            raise AdapterError(
                f"{self.name}: {name!r} must be described by dtype, shape and data_offsets", param=name
            )
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _READ:
            raise AdapterError(
                f"{self.name}: {name!r} has dtype {as_json(dtype, 40)}; supported are {', '.join(_READ)}",
                param=name,
            )
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise AdapterError(
                f"{self.name}: {name!r} has shape {as_json(shape)} and data_offsets {as_json(offsets)}; "
                f"these must be lists of at most {MAX_DIMS} and of two integers from 0 to 2^48",
                param=name,
            )
        need = math.prod(shape) * _READ[dtype].itemsize
        if offsets[1] - offsets[0] != need:
            raise AdapterError(
                f"{self.name}: {name!r} is {dtype} {shape}, which is {need} bytes, "
                f"but its data_offsets are {offsets}",
                param=name,
            )
        return TensorEntry(_READ[dtype], tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    return all(type(value) is int and 0 <= value <= MAX_COUNT for value in values)
