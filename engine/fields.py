"""Reads the fields of JSON files in a model folder, strictly."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from personae.errors import ModelLoadError, as_json

Scalar = TypeVar("Scalar", int, float, bool, str)


class Fields:
    """The fields of one JSON object, read with type checks. Every error names the file and the field.

    It knows which fields have been read.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self.where = where
        self._read: set[str] = set()
        self._sections: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.raw(name) is not None

    def given(self, name: str) -> bool:
        """Whether the object has the field, which may be null."""
        return name in self._values

    def error(self, name: str, why: str) -> ModelLoadError:
        """An error about one field, for the caller to raise."""
        return ModelLoadError(f"{self.where}: {name}: {why}")

    def raw(self, name: str) -> Any:
        """The field's value, unchecked; None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def get(self, name: str, default: Scalar) -> Scalar:
        """The field, of the default's type. An integer is accepted for a float."""
        value = self.raw(name)
        if value is None:
            return default
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise self.error(name, f"expected {type(default).__name__}, found {as_json(value)}")
        return value

    def number(
        self, name: str, *, default: float | None = None, zero: bool = False, high: float = float("inf")
    ) -> float:
        """A finite float over 0 (or 0, with `zero`), at most `high`. Without a default the field is
        required."""
        if default is None and name not in self:
            raise self.error(name, "is missing")
        value = self.get(name, default if default is not None else 0.0)
        if not 0 <= value <= high or value == float("inf") or (value == 0 and not zero):
            raise self.error(
                name, f"must be {'at least' if zero else 'over'} 0, at most {high:g}, found {as_json(value)}"
            )
        return value

    def optional_number(self, name: str, *, zero: bool = False, high: float = float("inf")) -> float | None:
        """As `number`, or None if the field is absent."""
        return self.number(name, zero=zero, high=high) if name in self else None

    def size(self, name: str, *, default: int | None = None, zero: bool = False) -> int:
        """A positive integer (or 0, with `zero`). Without a default the field is required."""
        if default is None and name not in self:
            raise self.error(name, "is missing")
        value = self.get(name, default if default is not None else 0)
        if value < (0 if zero else 1):
            raise self.error(name, f"must be at least {0 if zero else 1}, found {value}")
        return value

    def within(self, under: Mapping[str, Any], over: Mapping[str, Any]) -> "Fields":
        """These fields, over those of `under`, and under those of `over`."""
        fields = Fields({**under, **self._values, **over}, self.where)
        fields._read, fields._sections = self._read, self._sections
        return fields

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None if it is absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, found {as_json(value)}")
        return self._sections.setdefault(name, Fields(value, f"{self.where}: {name}"))

    def unread(self) -> "Iterator[tuple[Fields, str, Any]]":
        """The fields that nothing has read and that are not null, in this object and in the sections that
        were read: the section, the name and the value."""
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                yield self, name, value
        for section in self._sections.values():
            yield from section.unread()


def read_fields(path: Path) -> Fields:
    """Reads a JSON object from a file of a model folder."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing from {path.parent}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path.name} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path.name} is not a JSON object")
    return Fields(values, path.name)
