"""Turns what the caller wrote into schemas that a backend enforces, or into a refusal that gives the reason.

A schema goes to a backend as it was written if the gate accepts it, and in its canonical form otherwise. If
neither is fully enforced, a strict schema is refused. For one that is not strict, `weakened` gives what is
left of it.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs

from personae.errors import GrammarError, NotEnforced
from personae.grammar.schema.document import (
    MAX_SHORTEST,
    SCHEMA_PARAM,
    TOO_COMPLEX,
    Schema,
    dialect,
    pointer,
)
from personae.grammar.schema.gate import ASSERTIONS, Unenforced, unenforced, unwritable
from personae.grammar.schema.shortest import shortest_instance
from personae.grammar.schema.walk import Path, rebuild, subschemas

# Errors of the walks below, where references lead into parts of a document that no meta-schema has checked.
ANALYSIS_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# Rewriting turns these into other keywords: a keyword that the caller did not write came from one of them.
_ORIGINS = ("not", "oneOf", "if", "dependentSchemas", "dependentRequired", "dependencies", "allOf", "$ref")


# The drafts that introduced keywords. In a document of an earlier draft these keywords have no meaning.
_SINCE = {
    jsonschema_rs.Draft6: {"const", "contains", "propertyNames"},
    jsonschema_rs.Draft7: {"if", "then", "else"},
    jsonschema_rs.Draft201909: {"dependentRequired", "dependentSchemas", "minContains", "maxContains"}
    | {"unevaluatedProperties", "unevaluatedItems"},
    jsonschema_rs.Draft202012: {"prefixItems"},
}
_OF_JSON_SCHEMA = re.compile("https?://json-schema.org/")
_CURRENT = "https://json-schema.org/draft/2020-12/schema"
NAMES_OF_DRAFTS = {
    jsonschema_rs.Draft4: "http://json-schema.org/draft-04/schema#",
    jsonschema_rs.Draft6: "http://json-schema.org/draft-06/schema#",
    jsonschema_rs.Draft7: "http://json-schema.org/draft-07/schema#",
    jsonschema_rs.Draft201909: "https://json-schema.org/draft/2019-09/schema",
    jsonschema_rs.Draft202012: _CURRENT,
}
# What a keyword leaves to others: without it, these would reject what it accepts.
_RESTS = {
    "properties": ("additionalProperties", "unevaluatedProperties"),
    "patternProperties": ("additionalProperties", "unevaluatedProperties"),
    "prefixItems": ("items", "unevaluatedItems"),
    "items": ("additionalItems", "unevaluatedItems"),
    "contains": ("unevaluatedItems",),
}
_MOST_NAMED = 50
_FAR = 2**63 - 1  # the library has no integers from here on
_LEAST_AND_MOST = (
    *((least, most) for least in ("minimum", "exclusiveMinimum") for most in ("maximum", "exclusiveMaximum")),
    *((f"min{what}", f"max{what}") for what in ("Length", "Items", "Properties", "Contains")),
)

Culprit = tuple[str, Path]
"""A keyword that has to go, and where it stands."""


def without_ignored(document: Schema) -> Schema:
    """The document without what has no meaning: keywords that its draft does not have, up to draft 7 the
    siblings of a `$ref`, and a `$schema` of its own, which the library would look for."""
    draft = jsonschema_rs.Draft202012 if isinstance(document, bool) else dialect(document)
    if isinstance(document, dict) and not _OF_JSON_SCHEMA.match(str(document.get("$schema", _CURRENT))):
        document = document | {"$schema": NAMES_OF_DRAFTS[draft]}
    later = frozenset(keyword for since, brought in _SINCE.items() if since > draft for keyword in brought)
    siblings = ASSERTIONS - {"$ref"} if draft <= jsonschema_rs.Draft7 else frozenset()
    return _without_ignored(document, later, siblings, root=True) if later else document


def _without_ignored(
    schema: Schema, later: frozenset[str], siblings: frozenset[str], *, root: bool = False
) -> Schema:
    if not isinstance(schema, dict):
        return schema
    ignored = later
    if siblings and isinstance(schema.get("$ref"), str):
        ignored = later | siblings if root else later | siblings | {"$id", "id"}
    kept = {keyword: value for keyword, value in schema.items() if keyword not in ignored}
    return rebuild(kept, lambda _, child: _without_ignored(child, later, siblings))


def check_answerable(document: Schema) -> None:
    """Raises GrammarError if no answer satisfies the document, or none short enough to be found."""
    shortest = shortest_instance(document)
    if math.isinf(shortest):
        raise GrammarError("No finite answer satisfies the schema.", param=SCHEMA_PARAM)
    if shortest > MAX_SHORTEST:
        raise GrammarError(
            f"Every answer that satisfies the schema has at least {shortest:.0f} characters, "
            f"more than {MAX_SHORTEST}.",
            param=SCHEMA_PARAM,
            code=TOO_COMPLEX,
        )


def refusal(document: Schema, reason: Unenforced | GrammarError | None) -> NotEnforced:
    """Why `document` is refused: a keyword at the place where the caller wrote it, or a backend's message."""
    if not isinstance(reason, Unenforced):
        why = "" if reason is None else f" {reason.message}"
        code = None if reason is None else reason.code
        return NotEnforced(f"The schema at # cannot be enforced.{why}", param=SCHEMA_PARAM, code=code)
    return refused(document, [_origin(document, reason)])


def refused(document: Schema, blamed: list[Culprit]) -> NotEnforced:
    """The refusal that names these keywords."""
    named = [f"{keyword!r} at {pointer(path)}" for keyword, path in blamed[:_MOST_NAMED]]
    if len(blamed) > _MOST_NAMED:
        named.append(f"{len(blamed) - _MOST_NAMED} more")
    one = len(blamed) == 1
    said = named[0] if one else f"{', '.join(named[:-1])} and {named[-1]}"
    it = "it" if one else "them"
    odd = unwritable([_at(document, path) for _, path in blamed])
    why = "" if odd is None else f"No bound answer has the control character U+{ord(odd):04X}. "
    return NotEnforced(
        f"The keyword{'' if one else 's'} {said} cannot be enforced. {why}Remove {it}, or set strict to "
        "false for an answer that follows the schema as far as possible and is checked against it at the "
        "end.",
        param=SCHEMA_PARAM,
    )


def _at(document: Any, path: Path) -> Any:
    """What the document says at a path; None if a form of it that was judged has more than it."""
    for step in path:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return None
    return document


def _origin(document: Schema, finding: Unenforced) -> tuple[str, Path]:
    places = [(one, path) for one, path in subschemas(document) if finding.keyword in one]
    same = [path for one, path in places if one[finding.keyword] == finding.value]
    for path in [*same, *(path for _, path in places)]:
        return finding.keyword, (*path, finding.keyword)
    for keyword in _ORIGINS:
        for one, path in subschemas(document):
            if keyword in one:
                return keyword, (*path, keyword)
    return finding.keyword, ()


def contradictory(document: Schema) -> GrammarError | None:
    """The refusal of bounds that no value satisfies, if there are such."""
    for one, path in subschemas(document):
        for least, most in _LEAST_AND_MOST:
            low, high = one.get(least, False), one.get(most, False)
            if isinstance(low, bool) or isinstance(high, bool):
                continue  # in draft 4 these are true or false
            if low > high or (low == high and (least.startswith("excl") or most.startswith("excl"))):
                return GrammarError(
                    f"No value satisfies both {least!r} at {pointer((*path, least))} and {most!r} at "
                    f"{pointer((*path, most))}: {low} and {high}.",
                    param=SCHEMA_PARAM,
                )
    return None


def weakened(schema: Schema, backend: str) -> Schema:
    """The schema without the keywords that `backend` does not enforce."""
    dropped = {finding.path for finding in unenforced(schema, backend)}
    dropped |= {(*path[:-1], rest) for path in dropped for rest in _RESTS.get(str(path[-1]), ())}
    return without(dropped, schema)


def without(dropped: set[Path], schema: Schema, path: Path = ()) -> Schema:
    """The schema without the keywords at these paths."""
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if (*path, keyword) not in dropped}
    return rebuild(kept, lambda step, child: without(dropped, child, (*path, *step)))


def readable(schema: Schema, reads: Callable[[str], bool]) -> Schema:
    """The schema without what makes a backend refuse it as a whole: patterns that it cannot read, alone or
    next to each other, and bounds beyond its integers."""
    if not isinstance(schema, dict):
        return schema

    def stays(keyword: str, value: Any) -> bool:
        match keyword:
            case "pattern":
                return reads(value)
            case "patternProperties":
                return len(value) == 1 and all(map(reads, value))
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return bool(abs(value) < _FAR)
        return True

    dropped = {keyword for keyword, value in schema.items() if not stays(keyword, value)}
    dropped |= {rest for keyword in dropped for rest in _RESTS.get(keyword, ())}
    kept = {keyword: value for keyword, value in schema.items() if keyword not in dropped}
    return rebuild(kept, lambda _, child: readable(child, reads))


def loose(document: object) -> Schema:
    """The part of a document that any backend can bind: its type."""
    kind = document.get("type") if isinstance(document, dict) else None
    return {"type": kind} if isinstance(kind, str | list) else True
