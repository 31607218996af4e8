"""Finds and rebuilds the schemas within a schema."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

Path = tuple[str | int, ...]

# Keywords that hold one schema (`items` a list of them in older drafts), a list of schemas, or a mapping from
# names to schemas (`dependencies` also to lists of names).
ONE = frozenset(
    {
        "items",
        "additionalItems",
        "unevaluatedItems",
        "contains",
        "additionalProperties",
        "unevaluatedProperties",
    }
    | {"propertyNames", "not", "if", "then", "else"}
)
HITS = "x-personae-hits"
"""In an array, added here: the items that `contains` counts. The array's `items` are then those that it does
not count."""
ONE |= {HITS}
SET = "x-personae-set"
"""In an array, added here: true if none of its strings may come twice."""
DISTINCT = SET + "-of-values"
"""In an array, added here: true if no item may come twice. The items are written so that each value has one
spelling (`tracked/items.py`)."""
NAMES = SET + "-of-names"
"""In an object, added here: true if no property may come twice, so that those that are not listed can be
counted."""
FRACTION = "x-personae-fraction"
"""In a number, added here: true if the number must not be whole."""
MANY = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


_HOLDING = ONE | MANY | NAMED


def children(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """(path from here, schema) for each schema directly within `schema`."""
    for keyword, value in schema.items():
        if keyword not in _HOLDING:
            continue
        if keyword in NAMED:
            if isinstance(value, dict):
                for name, one in value.items():
                    yield (keyword, name), one
        elif isinstance(value, list):
            for index, one in enumerate(value):
                yield (keyword, index), one
        elif keyword in ONE:
            yield (keyword,), value


def rebuild(schema: dict[str, Any], change: Callable[[Path, Any], Any]) -> dict[str, Any]:
    """A copy of `schema`, with each schema directly within it replaced by `change(path from here,
    schema)`."""
    rebuilt: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword not in _HOLDING:
            pass
        elif keyword in NAMED and isinstance(value, dict):
            value = {name: change((keyword, name), one) for name, one in value.items()}
        elif isinstance(value, list) and (keyword in MANY or keyword in ONE):
            value = [change((keyword, index), one) for index, one in enumerate(value)]
        elif keyword in ONE:
            value = change((keyword,), value)
        rebuilt[keyword] = value
    return rebuilt


def subschemas(schema: Any, path: Path = ()) -> Iterator[tuple[dict[str, Any], Path]]:
    """Every schema object within a schema, and the schema itself, with its path, outermost first."""
    unseen = [(schema, path)]
    while unseen:
        one, path = unseen.pop()
        if isinstance(one, dict):
            yield one, path
            within = [(child, path + step) for step, child in children(one)]
            if within:
                within.reverse()
                unseen += within


def target(document: Any, reference: Any) -> Any:
    """The schema that a reference of the form "#/…" leads to; True, which allows anything, for all others."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    found = document
    for name in _steps(reference):
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return True
    return found


@lru_cache(4096)
def _steps(reference: str) -> tuple[str, ...]:
    steps = unquote(reference).split("/")[1:]
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
