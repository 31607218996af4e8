"""Parses and checks a caller's JSON Schema."""

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

import jsonschema_rs
import msgspec

from personae.errors import GrammarError, as_json, shortened
from personae.grammar.regex.library import library_pattern
from personae.grammar.schema.walk import Path, rebuild, subschemas

SCHEMA_PARAM = "response_format.json_schema.schema"
PARAMS = {
    "json_schema": SCHEMA_PARAM,
    "json_object": "response_format",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "ebnf": "structured_outputs.grammar",
    "lark": "structured_outputs.grammar",
}

SAID = {
    "json_schema": "JSON Schema",
    "json_object": "JSON object",
    "ebnf": "grammar, read as GBNF,",
    "lark": "grammar, read as Lark,",
}
"""How messages call a kind whose own name does not describe it."""

# The most whitespace characters between two tokens of JSON, except for a line break and the indentation after
# it (whitespace.py). Without a limit, a model might write blanks for ever.
MAX_WHITESPACE = 16

# The longest schema of the public collections has less than half of this.
MAX_LENGTH = 1_000_000

# Of the shortest answer, in characters. The search for a complete answer goes no further.
MAX_SHORTEST = 32_768
TOO_COMPLEX = "grammar_too_complex"

# People do not write deeper documents, and every walk below is recursive.
MAX_DEPTH = 64

Schema = dict[str, Any] | bool

_DIALECTS = {
    "draft-03": None,
    "draft-04": jsonschema_rs.Draft4,
    "draft-06": jsonschema_rs.Draft6,
    "draft-07": jsonschema_rs.Draft7,
    "2019-09": jsonschema_rs.Draft201909,
    "2020-12": jsonschema_rs.Draft202012,
}
_VALIDATORS: dict[int, type[jsonschema_rs.Validator]] = {
    jsonschema_rs.Draft4: jsonschema_rs.Draft4Validator,
    jsonschema_rs.Draft6: jsonschema_rs.Draft6Validator,
    jsonschema_rs.Draft7: jsonschema_rs.Draft7Validator,
    jsonschema_rs.Draft201909: jsonschema_rs.Draft201909Validator,
    jsonschema_rs.Draft202012: jsonschema_rs.Draft202012Validator,
}


def parse_schema(source: str) -> Schema:
    """Decode a schema and check that it is well-formed in its dialect.

    Raises GrammarError, with the place, if the text is not JSON, not a schema, nested too deeply, or has a
    `$ref` that does not resolve within it. Nothing is ever fetched.
    """
    return parse_with_validator(source)[0]


def parse_with_validator(source: str) -> tuple[Schema, jsonschema_rs.Validator]:
    """As `parse_schema`, together with the validator of instances that the check has built."""
    if len(source) > MAX_LENGTH:
        raise GrammarError(f"The schema is longer than {MAX_LENGTH} characters.", param=SCHEMA_PARAM)
    try:
        document = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"The schema is not valid JSON: {error}.", param=SCHEMA_PARAM) from error
    if not isinstance(document, dict | bool):
        raise GrammarError("A JSON Schema is an object, true or false.", param=SCHEMA_PARAM)
    _check_depth(document)
    return document, validator(document)


def dialect(document: dict[str, Any]) -> int:
    """The draft in which a document is written, with jsonschema-rs's number.

    This is the one that `$schema` names. Without it, 2020-12, or draft 7 for a document with keywords that
    have a meaning in draft 7 only. Raises GrammarError for any other `$schema`.
    """
    named = document.get("$schema")
    if named is None or "json-schema.org/schema" in str(named):
        return jsonschema_rs.Draft7 if _has_legacy_keywords(document) else jsonschema_rs.Draft202012
    draft = next((draft for name, draft in _DIALECTS.items() if name in str(named)), None)
    if draft is None:
        raise GrammarError(f"The $schema {as_json(named)} is not a supported dialect.", param=SCHEMA_PARAM)
    return draft


def _has_legacy_keywords(value: Any) -> bool:
    if isinstance(value, dict):
        legacy = isinstance(value.get("dependencies"), dict) or isinstance(value.get("items"), list)
        return legacy or "additionalItems" in value or any(map(_has_legacy_keywords, value.values()))
    return isinstance(value, list) and any(map(_has_legacy_keywords, value))


def validator(document: Schema) -> jsonschema_rs.Validator:
    """A validator of instances, including formats. Raises GrammarError as `parse_schema` does."""
    draft = dialect(document) if isinstance(document, dict) else jsonschema_rs.Draft202012
    try:
        return _VALIDATORS[draft](for_library(document), offline=True, validate_formats=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        path, reason = _failure(error, document)
        place = pointer(path or _reference_to_nothing(document, reason))
        raise GrammarError(
            f"The schema is malformed at {place}: {shortened(reason)}.", param=SCHEMA_PARAM
        ) from error


def for_library(schema: Any) -> Any:
    """An equal schema whose patterns the library reads as ECMA-262 does."""
    if not isinstance(schema, dict):
        return schema
    rebuilt = rebuild(schema, lambda _, child: for_library(child))
    if isinstance(pattern := rebuilt.get("pattern"), str):
        rebuilt["pattern"] = library_pattern(pattern)
    if isinstance(named := rebuilt.get("patternProperties"), dict):
        written = {library_pattern(pattern): one for pattern, one in named.items()}
        if len(written) == len(named):
            rebuilt["patternProperties"] = written
    return rebuilt


def as_written(document: Schema, path: Path) -> tuple[Path, Any]:
    """A place that the library names, with names of patterns as the schema writes them, and what is there;
    None if that is unknown, as within an embedded document, whose places begin with it."""
    written: list[str | int] = []
    found: Any = document
    for step in path:
        if isinstance(found, dict) and step not in found:
            step = next((name for name in found if library_pattern(name) == step), step)
        written.append(step)
        try:
            found = found[step]
        except (LookupError, TypeError):
            return path, None
    return tuple(written), found


def _failure(
    error: jsonschema_rs.ValidationError | jsonschema_rs.ReferencingError, document: Schema
) -> tuple[Path, str]:
    """Where a schema violates its dialect, and how. If one form of several is required, the error of the form
    that comes closest."""
    if isinstance(error, jsonschema_rs.ReferencingError):
        return (), error.message.rstrip(".")
    while isinstance(kind := error.kind, jsonschema_rs.ValidationErrorKind.AnyOf):
        error = max(chain.from_iterable(kind.context), key=lambda inner: len(inner.instance_path))
    reason = error.message.rstrip(".")
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.Enum):
        reason = f"{as_json(error.instance)} is not one of {', '.join(map(str, kind.options))}"
    path = tuple(error.instance_path)
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.Format) and kind.format == "regex":
        path, found = as_written(document, path)
        pattern = found if isinstance(found, str) else path[-1]
        reason = f"{pattern!r:.80} is not a regular expression, or is too large"
    return path, reason


def _reference_to_nothing(document: Schema, message: str) -> Path:
    """Where the reference is whose fragment a message quotes; the whole document if it is not found."""
    named = re.search("'(.*)'", message)
    for schema, path in subschemas(document):
        if named and str(schema.get("$ref", "")).endswith(named[1]):
            return (*path, "$ref")
    return ()


def pointer(path: Iterable[str | int]) -> str:
    """A JSON pointer in its URI fragment form: "#" is the whole document (RFC 6901)."""
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def _check_depth(document: Schema) -> None:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise GrammarError(f"The schema is nested more than {MAX_DEPTH} levels deep.", param=SCHEMA_PARAM)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
