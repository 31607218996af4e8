"""Renames the fields of a chat completion in errors, for a request of another API that was translated into
one."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from personae.errors import RequestError

_QUOTED = re.compile(r"`([^`]+)`")


class FieldNames:
    """Maps the fields that errors name to the client's own. `patterns` are regular expressions with
    replacements, for fields that are always at the same place."""

    def __init__(self, patterns: Sequence[tuple[str, str]] = ()) -> None:
        self._patterns = [(re.compile(pattern), name) for pattern, name in patterns]
        self._places: dict[str, str] = {}

    def put(self, chat: str, own: str) -> None:
        """The field `chat`, and everything in it, comes from the client's field `own`."""
        self._places[chat] = own

    def of(self, field: str) -> str:
        """The client's name for a field."""
        for end in sorted({len(field), *(at.start() for at in re.finditer(r"[.\[]", field))}, reverse=True):
            if (place := self._places.get(field[:end])) is not None:
                return place + field[end:]
        for pattern, name in self._patterns:
            field = pattern.sub(name, field)
        return field

    def rename(self, error: RequestError) -> None:
        """Make an error name the client's fields."""
        error.message = _QUOTED.sub(lambda found: f"`{self.of(found[1])}`", error.message)
        error.param = None if error.param is None else self.of(error.param)

    def rename_all(self, fields: list[str]) -> None:
        """Replace fields by the client's names."""
        fields[:] = [self.of(field) for field in fields]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Errors inside the block name the client's fields."""
        try:
            yield
        except RequestError as error:
            self.rename(error)
            raise
