"""A caller's JSON Schema, from text to a well-formed document."""

from collections.abc import Iterable
from typing import Any

import jsonschema_rs
import msgspec

from personae.errors import GrammarError

SCHEMA_PARAM = "response_format.json_schema.schema"

# The most whitespace characters between two tokens of JSON: enough for a line break and a deep indent, and an
# end to a model that would write blanks for ever.
MAX_WHITESPACE = 16

# Deeper documents are not written by people, and every walk below is recursive.
MAX_DEPTH = 64

Schema = dict[str, Any] | bool

_DIALECTS: dict[str, type[jsonschema_rs.Validator]] = {
    "draft-04": jsonschema_rs.Draft4Validator,
    "draft-06": jsonschema_rs.Draft6Validator,
    "draft-07": jsonschema_rs.Draft7Validator,
    "2019-09": jsonschema_rs.Draft201909Validator,
    "2020-12": jsonschema_rs.Draft202012Validator,
}


def parse_schema(source: str) -> Schema:
    """Decode a schema and check that it is well-formed in its dialect.

    The dialect is the one that `$schema` names; without it 2020-12, or draft 7 for schemas that only draft 7
    knows how to read. Raises GrammarError, naming the place, when the text is not JSON, not a schema, nested
    too deeply, or when a `$ref` does not resolve within it: nothing is ever fetched.
    """
    try:
        document = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"The schema is not valid JSON: {error}.", param=SCHEMA_PARAM) from error
    if not isinstance(document, dict | bool):
        raise GrammarError("A JSON Schema is an object, true or false.", param=SCHEMA_PARAM)
    _check_depth(document)
    validator(document)
    return document


def validator(schema: Schema) -> jsonschema_rs.Validator:
    """A validator of instances for a schema in any dialect. Raises GrammarError as `parse_schema` does."""
    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    dialects = [dialect for name, dialect in _DIALECTS.items() if name in named]
    failure: Exception | None = None
    for dialect in dialects or [jsonschema_rs.Draft202012Validator, jsonschema_rs.Draft7Validator]:
        try:
            return dialect(schema, offline=True)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            failure = failure or error
    place = pointer(getattr(failure, "instance_path", []))
    reason = str(getattr(failure, "message", failure)).rstrip(".")
    raise GrammarError(f"The schema is malformed at {place}: {reason}.", param=SCHEMA_PARAM) from failure


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
