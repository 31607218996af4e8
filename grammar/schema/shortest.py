"""How short an answer can be: a lower bound, which is infinite if no answer ever ends.

A grammar would follow a schema such as {"type": "array", "items": {"$ref": "#"}, "minItems": 1} bracket after
bracket without end. So such a schema is refused first.
"""

import json
import math
from typing import Any

from personae.grammar.schema.document import Schema
from personae.grammar.schema.walk import children, target

_WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_BY_TYPE = {"null": 4.0, "boolean": 4.0, "integer": 1.0, "number": 1.0}


class Lengths:
    """Lower bounds, in characters, of the compact JSON of the instances of a document's schemas; infinite if
    a schema has none.

    This is the least fixed point over the references within the document. Unknown keywords make a bound
    lower.
    """

    def __init__(self, document: Schema) -> None:
        targets: dict[str, Any] = {}
        seen: set[int] = set()
        unseen: list[Any] = [document]
        while unseen:  # a reference may lead where no keyword leads
            one = unseen.pop()
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                reference = str(one.get("$ref", "#"))
                if reference not in targets:
                    targets[reference] = target(document, reference)
                    unseen.append(targets[reference])
                unseen += (child for _, child in children(one))
        self._lengths = dict.fromkeys(targets, math.inf)
        while True:
            improved = {reference: self.of(one) for reference, one in targets.items()}
            if improved == self._lengths:
                break
            self._lengths = improved

    def of(self, schema: Any) -> float:
        """The bound of a schema of the document, or one whose references are all in it."""
        return _length(schema, self._lengths)


def shortest_instance(document: Schema) -> float:
    """The bound of a whole document."""
    return Lengths(document).of(document)


def shortest_alone(schema: Any) -> float | None:
    """As `shortest_instance`, for a part of a schema. None if it depends on a reference."""
    try:
        return _length(schema, {})
    except KeyError:
        return None


def _length(schema: Any, lengths: dict[str, float]) -> float:
    if not isinstance(schema, dict):
        return 1.0 if schema else math.inf
    bounds = [1.0]
    if "$ref" in schema:
        bounds.append(lengths[str(schema["$ref"])])
    bounds += [_length(one, lengths) for one in schema.get("allOf", ())]
    bounds += [
        min((_length(one, lengths) for one in schema[keyword]), default=math.inf)
        for keyword in ("anyOf", "oneOf")
        if keyword in schema
    ]
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        bounds.append(min((_written(value) for value in values), default=math.inf))
    elif "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        bounds.append(min(_length_of_type(kind, schema, lengths) for kind in kinds))
    return max(bounds)


def _length_of_type(kind: str, schema: dict[str, Any], lengths: dict[str, float]) -> float:
    if kind == "string":
        return 2.0 + float(schema.get("minLength", 0))
    if kind == "array":
        return _length_of_array(schema, lengths)
    if kind != "object":
        return _BY_TYPE[kind]
    listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if "patternProperties" in schema:
        others = True
    members = [
        _written(name) + 1 + _length(listed.get(name, others), lengths) for name in schema.get("required", ())
    ]
    return 2 + sum(members) + max(0, len(members) - 1)


def _length_of_array(schema: dict[str, Any], lengths: dict[str, float]) -> float:
    count = schema.get("minItems", 0)
    items = schema.get("items", True)
    first = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    members = sum((_length(one, lengths) for one in first[:count]), 0.0)
    if count > len(first):
        members += (count - len(first)) * _length(rest, lengths)
    return float(2 + members + max(0, count - 1))


def _written(value: Any) -> float:
    return float(len(_WRITER.encode(value)))
