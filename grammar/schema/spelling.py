"""Keywords and formats that are spelled nearly as one that binds. JSON Schema passes over what it does not
know; in a schema that is to be enforced wholly a slip would bind nothing, and nobody would be told.
"""

from collections.abc import Iterable
from functools import lru_cache

from personae.errors import GrammarError
from personae.grammar.schema.document import SCHEMA_PARAM, Schema, pointer
from personae.grammar.schema.formats import FORMATS
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.walk import subschemas

_SHORT, _LONG = 4, 8  # characters: names from the first on may have a slip, from the second on two


def check_spelling(document: Schema) -> None:
    """Raises GrammarError, with the place and what was probably meant. Names that begin as none of JSON
    Schema's do (`x-`, `_`, `@`) are the writer's own."""
    for schema, path in subschemas(document):
        for name, value in schema.items():
            if (meant := _meant_keyword(name)) is not None:
                raise _refused("keyword", name, meant, pointer((*path, name)))
            if name == "format" and isinstance(value, str) and (meant := _meant_format(value)) is not None:
                raise _refused("format", value, meant, pointer((*path, name)))


@lru_cache(4096)
def _meant_keyword(name: str) -> str | None:
    if name in ASSERTIONS or name.startswith(("x-", "_", "@")):
        return None
    return _nearest(name, ASSERTIONS)


@lru_cache(4096)
def _meant_format(name: str) -> str | None:
    return None if name in FORMATS else _nearest(name, FORMATS)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    found = ((_slips(name.lower(), one.lower()), one) for one in known)
    near = [(slips, one) for slips, one in found if slips <= (len(one) >= _SHORT) + (len(one) >= _LONG)]
    return min(near)[1] if near else None


def _slips(a: str, b: str) -> int:
    """Characters that are wrong, missing, too many, or in the wrong order with the next (the restricted
    Damerau-Levenshtein distance); a large number for names of different lengths."""
    if abs(len(a) - len(b)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        new = [i]
        for j, y in enumerate(b, start=1):
            least = min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y))
            if before and j > 1 and x == b[j - 2] and a[i - 2] == y:
                least = min(least, before[j - 2] + 1)
            new.append(least)
        before, row = row, new
    return row[-1]


def _refused(kind: str, name: str, meant: str, place: str) -> GrammarError:
    return GrammarError(
        f"The {kind} {name[:80]!r} at {place} is not known and would bind nothing; did you mean {meant!r}? "
        "With strict set to false it is passed over.",
        param=SCHEMA_PARAM,
    )
