"""Checks whether a finished answer is valid, for answers that a grammar could not bind completely."""

import msgspec

from personae.grammar.schema.document import parse_with_validator, pointer
from personae.grammar.spec import GrammarSpec

MAX_VIOLATIONS = 10


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
    _, validator = parse_with_validator(spec.source)
    for failure in validator.iter_errors(instance):
        violations.append(SchemaViolation(pointer(failure.instance_path), failure.message))
        if len(violations) == MAX_VIOLATIONS:
            break
    return SchemaValidation(not violations, tuple(violations))
