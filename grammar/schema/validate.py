"""Checks whether a finished answer is valid, for answers that a grammar could not bind completely."""

import json

import jsonschema_rs
import msgspec

from personae.errors import shortened
from personae.grammar.regex.library import library_pattern
from personae.grammar.schema.document import Schema, as_written, parse_with_validator, pointer
from personae.grammar.spec import GrammarSpec

MAX_VIOLATIONS = 10

_JSON = json.JSONEncoder(ensure_ascii=False).encode


class SchemaViolation(msgspec.Struct, frozen=True):
    """A part of an answer that violates the schema: its JSON pointer in the answer, and the reason."""

    pointer: str
    message: str


class SchemaValidation(msgspec.Struct, frozen=True):
    """The outcome of checking an answer; `violations` holds the first few, and none when it is valid."""

    valid: bool
    violations: tuple[SchemaViolation, ...] = ()


def validate_answer(spec: GrammarSpec, answer: str) -> SchemaValidation:
    """Check an answer's text against a spec of kind `json_schema`, with jsonschema-rs, formats included.

    Raises GrammarError when the schema itself is malformed.
    """
    try:
        instance = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError) as error:
        return SchemaValidation(False, (SchemaViolation("#", f"The answer is not JSON: {error}"),))
    violations = []
    schema, validator = parse_with_validator(spec.source)
    for failure in validator.iter_errors(instance):
        message = shortened(_message(failure, schema))
        violations.append(SchemaViolation(pointer(failure.instance_path), message))
        if len(violations) == MAX_VIOLATIONS:
            break
    return SchemaValidation(not violations, tuple(violations))


def _message(failure: jsonschema_rs.ValidationError, schema: Schema) -> str:
    """What the library says, with a pattern as the schema writes it."""
    if isinstance(kind := failure.kind, jsonschema_rs.ValidationErrorKind.Pattern):
        _, pattern = as_written(schema, tuple(failure.schema_path))
        if isinstance(pattern, str) and library_pattern(pattern) == kind.pattern:
            return f"{_JSON(failure.instance)} does not match {_JSON(pattern)}"
    return failure.message
