"""Finds keywords and formats that are probably misspelled. JSON Schema ignores unknown names, so a misspelled
keyword would bind nothing. A strict schema is refused instead.

Known names of other tools are not misspellings, however close they are. They are accepted, with a note.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from personae.errors import GrammarError
from personae.grammar.fuzzy_match import nearest
from personae.grammar.schema.culprits import culprits
from personae.grammar.schema.document import SCHEMA_PARAM, Schema, pointer
from personae.grammar.schema.formats import FORMATS
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.prepare import refused
from personae.grammar.schema.walk import Path, subschemas

_MOST_NAMED = 50
_SECONDS = 0.05  # of processor time, to find what else has to go

# Names of zod, pydantic, OpenAPI, TypeBox, Ajv, editors and other generators of schemas. They bind nothing
# here.
FOREIGN_FORMATS = frozenset(
    {"ulid", "cuid", "cuid2", "guid", "xid", "ksuid", "nanoid", "jwt", "e164", "emoji", "url", "mac"}
    | {"base64", "base64url", "cidrv4", "cidrv6", "cidr", "ip", "ipvanyaddress", "ipvanynetwork", "hex"}
    | {"ipv4network", "ipv4interface", "ipv6network", "ipv6interface", "ipvanyinterface", "httpurl"}
    | {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal"}
    | {"byte", "binary", "password", "color", "phone", "file-path", "directory-path", "path", "name-email"}
    | {"json-string", "datetime", "date-time-local", "unix-time", "timestamp", "time-delta", "uuid1", "uuid3"}
    | {"uuid4", "uuid5", "uuid6", "uuid7", "uuid8", "uuidv4", "uuidv6", "uuidv7", "multi-host-uri"}
    | {"iso-time", "iso-date-time", "lowercase", "uppercase", "safeint", "slug"}
)
FOREIGN_KEYWORDS = frozenset(
    {"$extends", "multiple", "optional", "nullable", "example", "examples", "default", "title", "description"}
    | {"const_", "types", "elements", "values", "ref", "refs", "propertyOrder", "propertyOrdering", "xml"}
    | {"enumNames", "enumDescriptions", "enumTitles", "formatMinimum", "formatMaximum", "instanceOf"}
    | {"instanceof", "typeof", "kind", "uniqueKeys", "uniqueItemProperties", "patternRequired", "select"}
    | {"prohibited", "transform", "regexp", "range", "discriminator", "patternErrorMessage", "errorMessage"}
    | {"formatExclusiveMinimum", "formatExclusiveMaximum", "contentSchema", "contentEncoding", "items_"}
)
# Keywords of JSON Schema, of some draft, that name places or annotate.
ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$vocabulary", "$comment", "$recursiveAnchor", "$defs", "definitions"}
    | {"title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples"}
    | {"contentEncoding", "contentMediaType", "contentSchema"}
)


class CloseMatch(NamedTuple):
    """A name that binds nothing, its kind and path, and what was probably meant (None for a name of another
    tool)."""

    kind: str
    name: str
    path: Path
    meant: str | None


def check_spelling(document: Schema, enforced: Callable[[Schema], bool] = lambda _: True) -> None:
    """Raises GrammarError for all misspellings, with their places and what was probably meant. The error also
    names the keywords that are not enforced. Names that begin with `x-`, `_` or `@` are the writer's own."""
    close_matches = [match for match in _close_matches(document) if match.meant is not None]
    if not close_matches:
        return
    said = [_sentence(match) for match in close_matches[:_MOST_NAMED]]
    if len(close_matches) > _MOST_NAMED:
        said.append(f"There are {len(close_matches) - _MOST_NAMED} more.")
    said.append(f"With strict set to false {'it is' if len(close_matches) == 1 else 'they are'} ignored.")
    if blamed := culprits(document, enforced, seconds=_SECONDS):
        said.append(refused(document, blamed).message)
    raise GrammarError(" ".join(said), param=SCHEMA_PARAM)


def foreign(document: Schema | None) -> list[str]:
    """The pointers of keywords and formats that JSON Schema does not have, and that bind nothing. Names that
    begin with `x-`, `_` or `@` are the writer's own."""
    found = []
    for schema, path in subschemas(document):
        for name, value in schema.items():
            own = name in ASSERTIONS or name in ANNOTATIONS or name.startswith(("x-", "_", "@"))
            if not own or (name == "format" and isinstance(value, str) and value not in FORMATS):
                found.append(pointer((*path, name)))
    return found


def _close_matches(document: Schema | None) -> Iterator[CloseMatch]:
    for schema, path in subschemas(document):
        for name, value in schema.items():
            if (meant := _meant_keyword(name)) is not None:
                yield CloseMatch("keyword", name, (*path, name), None if name in FOREIGN_KEYWORDS else meant)
            if name == "format" and isinstance(value, str) and (meant := _meant_format(value)) is not None:
                yield CloseMatch("format", value, (*path, name), None if value in FOREIGN_FORMATS else meant)


def _sentence(match: CloseMatch) -> str:
    return (
        f"The {match.kind} {match.name[:80]!r} at {pointer(match.path)} is unknown and would bind nothing; "
        f"did you mean {match.meant!r}?"
    )


@lru_cache(4096)
def _meant_keyword(name: str) -> str | None:
    if name in ASSERTIONS or name.startswith(("x-", "_", "@")):
        return None
    return nearest(name, ASSERTIONS)


@lru_cache(4096)
def _meant_format(name: str) -> str | None:
    return None if name in FORMATS else nearest(name, FORMATS)
