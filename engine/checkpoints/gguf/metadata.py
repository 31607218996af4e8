"""Metadata of a GGUF file, read with type checks. Every error names the file and the field."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from personae.engine.checkpoints.gguf.header import Texts
from personae.errors import ModelLoadError, as_json

_LARGEST = 2**31


class Metadata:
    """`values` by key, as the header has them. `where`: the file's name."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def error(self, key: str, why: str) -> ModelLoadError:
        """An error about one field, for the caller to raise."""
        return ModelLoadError(f"{self.where}: {key}: {why}")

    def raw(self, key: str) -> Any:
        """The field's value, unchecked; None if it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def refuse_unread(self, prefix: str, meaningless: Collection[str] = ()) -> None:
        """Raises ModelLoadError for a field below `prefix` that nothing has read: it may change what the
        model computes. `meaningless` are the fields that change nothing here, without the prefix."""
        for key in self._values:
            if key.startswith(prefix) and key not in self._read and key[len(prefix) :] not in meaningless:
                raise self.error(key, "is not supported")

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string. Without a default it is required."""
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, found {_shown(value)}")
        return value

    def integer(self, key: str, *, default: int | None = None) -> int:
        """An integer from 0 to 2^31. An array that repeats one integer, one per layer, counts as that
        integer."""
        value = self._given(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise self.error(key, f"expected an integer from 0 to {_LARGEST}, found {_shown(value)}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number, which may be an integer."""
        value = self._given(key, default)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.error(key, f"expected a number, found {_shown(value)}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._given(key, default)
        if type(value) is not bool:
            raise self.error(key, f"expected true or false, found {_shown(value)}")
        return value

    def texts(self, key: str) -> Texts:
        """An array of strings."""
        value = self._given(key, None)
        if not isinstance(value, Texts):
            raise self.error(key, f"expected an array of strings, found {_shown(value)}")
        return value

    def integers(self, key: str, *, default: list[int]) -> list[int]:
        """An array of integers."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.error(key, f"expected an array of integers, found {_shown(value)}")
        found: list[int] = value.tolist()
        return found

    def per_layer(self, key: str, layers: int, *, default: int | None = None) -> list[int]:
        """An integer for each layer: an array of them, or one for all."""
        if not isinstance(self.raw(key), np.ndarray):
            return [self.integer(key, default=default)] * layers
        found = self.integers(key, default=[])
        if len(found) != layers or any(not 0 <= each <= _LARGEST for each in found):
            raise self.error(key, f"expected an integer from 0 to {_LARGEST} for each of {layers} layers")
        return found

    def flags(self, key: str) -> list[bool]:
        """An array of true and false."""
        value = self._given(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "b":
            raise self.error(key, f"expected an array of true and false, found {_shown(value)}")
        found: list[bool] = value.tolist()
        return found

    def numbers(self, key: str) -> list[float]:
        """An array of numbers."""
        value = self._given(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not np.isfinite(value).all():
            raise self.error(key, f"expected an array of finite numbers, found {_shown(value)}")
        found: list[float] = value.tolist()
        return found

    def _given(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _shown(value: Any) -> str:
    if isinstance(value, Texts | np.ndarray):
        return f"an array of {len(value)}"
    return as_json(value)
