"""Shares equal parts of a schema: what is repeated in it, or was copied by inlining its references, becomes
one definition with references."""

import re
from collections import Counter
from typing import Any

from personae.grammar.schema.walk import Path, children, rebuild, subschemas

_LEAST = 40  # characters; shorter parts are not worth a reference
_HOME = "$defs"
_TO_A_DEFINITION = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")
# Places where backends combine a schema with its siblings, which is easier without a reference.
_TOGETHER = frozenset({"allOf", "oneOf", "not", "if", "then", "else", "propertyNames", "contains"})


def shared(document: Any) -> Any:
    """An equal schema in which every large part that occurs more than once is a definition.

    References within `document` must start at the root: pointers from "#".
    """
    if not isinstance(document, dict):
        return document
    sharing = _Sharing(document.get(_HOME, {}))
    sharing.read(document)
    sharing.count(document)
    written = sharing.written(document)
    if not sharing.definitions:
        return document
    return written | {_HOME: written.get(_HOME, {}) | sharing.definitions}


def shared_as_written(document: Any) -> Any:
    """As `shared`; the document itself if its references may lead to parts that would have moved."""
    for one, path in subschemas(document):
        starts_anew = path and ("$id" in one or "id" in one)
        if starts_anew or not _TO_A_DEFINITION.fullmatch(str(one.get("$ref", "#"))):
            return document
    return shared(document)


def refers_to_definitions(document: Any) -> bool:
    """Whether every reference leads to the root or a definition, which stay where they are when the rest is
    rewritten."""
    return all(_TO_A_DEFINITION.fullmatch(str(one.get("$ref", "#"))) for one, _ in subschemas(document))


class _Sharing:
    def __init__(self, taken: dict[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self._taken = taken
        self._numbers: dict[tuple[Any, ...], int] = {}  # by what a schema says
        self._number_of: dict[int, int] = {}  # by the schema's identity
        self._sizes: list[int] = []
        self._counts: Counter[int] = Counter()
        self._names: dict[int, str] = {}

    def read(self, schema: Any) -> int:
        """Give equal schemas the same number. The order of properties counts."""
        if not isinstance(schema, dict):
            return -2 if schema is True else -1
        within = [(step, self.read(one)) for step, one in children(schema)]
        holding = {step[0] for step, _ in within}
        plain = {keyword: value for keyword, value in schema.items() if keyword not in holding}
        said = repr(plain)
        key = (said, *within)
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._sizes):
            below = (self._sizes[one] if one >= 0 else 4 for _, one in within)
            self._sizes.append(len(said) + sum(below) + sum(len(str(step[-1])) for step, _ in within))
        self._number_of[id(schema)] = number
        return number

    def count(self, schema: Any) -> None:
        """Count how often each schema occurs; the inside of equal ones counts once."""
        unseen = [schema]
        while unseen:
            one = unseen.pop()
            if isinstance(one, dict):
                number = self._number_of[id(one)]
                self._counts[number] += 1
                if self._counts[number] == 1:
                    unseen += (child for _, child in children(one))

    def written(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema with references in it."""
        alone = not (schema.keys() - {"anyOf", _HOME, "definitions", "$schema", "$id"})

        def change(step: Path, child: Any) -> Any:
            if not isinstance(child, dict):
                return child
            number = self._number_of[id(child)]
            fixed = step[0] in (*_TOGETHER, _HOME, "definitions") or (step[0] == "anyOf" and not alone)
            if fixed or self._counts[number] < 2 or self._sizes[number] < _LEAST:
                return self.written(child)
            if number not in self._names:
                name = self._names[number] = self._free(len(self._names))
                self.definitions[name] = self.written(child)
            return {"$ref": f"#/{_HOME}/{self._names[number]}"}

        return rebuild(schema, change)

    def _free(self, index: int) -> str:
        name = f"shared-{index}"
        while name in self._taken:
            name += "-"
        return name
