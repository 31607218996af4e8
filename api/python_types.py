"""Python types as the shape of an answer: for the in-process API, where `response_format` may be a type.

A class with fields (pydantic model, dataclass, TypedDict, msgspec.Struct) is a JSON object with these fields
and no others. Other types are JSON as pydantic and msgspec write them. A Literal or an Enum of texts is one
of these texts, without quotes. Terms of `outlines.types` keep their meaning.
"""

import enum
import sys
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from personae.api.wire.schema import ResponseFormat
from personae.errors import RequestError

_OUTLINES = "outlines.types.dsl"
_CHOICE, _REGEX, _GRAMMAR, _JSON = "choice", "regex", "grammar", "json"
_FIELD = "response_format"


def with_types(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request, with a type in `response_format` replaced by what a client would send.

    Raises RequestError for a type that has no such form.
    """
    wanted = fields.get(_FIELD)
    if wanted is None or isinstance(wanted, dict | ResponseFormat):
        return fields
    if fields.get("structured_outputs") is not None:
        raise RequestError(
            "`structured_outputs` and `response_format` cannot be combined.", param="structured_outputs"
        )
    kind, value = _bound(wanted)
    return {**fields, _FIELD: None, "structured_outputs": {kind: value}}


def _bound(wanted: Any) -> tuple[str, Any]:
    if term := _outlines_name(wanted):
        return _term(wanted, term)
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        texts = [member.value for member in wanted]
        if all(isinstance(text, str) for text in texts):
            return _CHOICE, texts
    if typing.get_origin(wanted) is typing.Literal:
        texts = list(typing.get_args(wanted))
        if all(isinstance(text, str) for text in texts):
            return _CHOICE, texts
    return _JSON, _schema(wanted)


def _schema(wanted: Any) -> dict[str, Any]:
    """The JSON Schema of a type, with closed objects."""
    problem: Exception | None = None
    for schema_of in _writers(wanted):
        try:
            closed = _closed(schema_of(wanted))
        except Exception as error:  # each package has errors of its own
            problem = problem or error
        else:
            assert isinstance(closed, dict), "a schema is an object"
            return closed
    name = getattr(wanted, "__name__", repr(wanted))[:100]
    message = f"`{_FIELD}`: {name} has no JSON Schema: {problem}"
    raise RequestError(message, param=_FIELD, code="invalid_type") from problem


def _writers(wanted: Any) -> list[Callable[[Any], Any]]:
    """The functions that may know a type's schema. pydantic comes first if it is in use, because it also
    reads annotations that msgspec would ignore."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or hasattr(wanted, "__struct_fields__"):
        return [msgspec.json.schema]
    return [lambda kind: pydantic.TypeAdapter(kind).json_schema(), msgspec.json.schema]


def _closed(value: Any) -> Any:
    """The schema with no further properties in objects that list some and do not mention others."""
    if isinstance(value, list):
        return [_closed(one) for one in value]
    if not isinstance(value, dict):
        return value
    closed = {name: _closed(one) for name, one in value.items()}
    if isinstance(value.get("properties"), dict) and value.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _outlines_name(wanted: Any) -> str | None:
    """The name of the term's class in outlines, if it is a term. outlines is not imported for that."""
    names = {kind.__name__ for kind in type(wanted).__mro__ if kind.__module__ == _OUTLINES}
    if "Term" not in names:
        return None
    return next((name for name in ("JsonSchema", "CFG", "Choice", "Regex") if name in names), "Term")


def _term(term: Any, kind: str) -> tuple[str, Any]:
    match kind:
        case "JsonSchema":
            return _JSON, _closed(msgspec.json.decode(term.schema))
        case "CFG":
            return _GRAMMAR, term.definition
        case "Choice" if all(isinstance(item, str) for item in term.items):
            return _CHOICE, list(term.items)
        case "Regex":
            return _REGEX, term.pattern
    from outlines.types.dsl import to_regex

    return _REGEX, to_regex(term)
