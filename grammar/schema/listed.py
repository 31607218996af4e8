"""Rewrites schemas that list their values, and restrict them further, as the values that remain."""

from typing import Any

import jsonschema_rs

from personae.grammar.schema.disjoint import named_value
from personae.grammar.schema.document import Schema, dialect, for_library
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.walk import rebuild, subschemas, target

_VALIDATORS = {
    jsonschema_rs.Draft4: jsonschema_rs.Draft4Validator,
    jsonschema_rs.Draft6: jsonschema_rs.Draft6Validator,
    jsonschema_rs.Draft7: jsonschema_rs.Draft7Validator,
    jsonschema_rs.Draft201909: jsonschema_rs.Draft201909Validator,
    jsonschema_rs.Draft202012: jsonschema_rs.Draft202012Validator,
}
_HOMES = ("$defs", "definitions")
_DEPTH = 8


def with_values_left(document: Schema) -> Schema:
    """An equal schema, in which a schema that lists values and says more is a list of the values that satisfy
    all of it, and false if there are none. The document itself if no schema does."""
    if isinstance(document, bool):
        return document
    nodes = [node for node, _ in subschemas(document)]
    if not any("enum" in node or "const" in node for node in nodes):
        return document
    if any(path and ("$id" in node or "id" in node) for node, path in subschemas(document)):
        return document  # references are relative to them
    found: Schema = _Lister(document).written(document, root=True)
    return found


class _Lister:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._draft = dialect(document)
        self._around = {name: document[name] for name in (*_HOMES, "$schema") if name in document}
        self._around_judged = for_library(self._around)

    def written(self, schema: Any, *, root: bool = False) -> Any:
        """A schema with the values that are left."""
        if not isinstance(schema, dict):
            return schema
        values = self._left(schema)
        if values is None:
            return rebuild(schema, lambda _, child: self.written(child))
        if not values:
            return False
        found: dict[str, Any] = {"enum": values}
        if root:
            homes = {name: value for name, value in self._around.items() if name not in found}
            found |= rebuild(homes, lambda _, child: self.written(child))
        return found

    def _left(self, schema: dict[str, Any]) -> list[Any] | None:
        """The values that satisfy the schema. None if it lists none, or says nothing else."""
        said = schema.keys() & ASSERTIONS
        if (
            not said - {"enum", "const", "type"}
            or said <= {"anyOf", "$ref"}
            or not self._can_be_judged(schema)
        ):
            return None
        values = self._listed(schema, _DEPTH)
        if values is None:
            return None
        judged = {**self._around_judged, **for_library(schema)}
        judge = _VALIDATORS[self._draft](judged, offline=True, validate_formats=True)
        left = {named_value(value): value for value in values if judge.is_valid(value)}
        return list(left.values())

    def _can_be_judged(self, schema: dict[str, Any]) -> bool:
        references = [str(node["$ref"]) for node, _ in subschemas(schema) if "$ref" in node]
        return all(one.startswith(tuple(f"#/{home}/" for home in _HOMES)) for one in references)

    def _listed(self, schema: Any, depth: int) -> list[Any] | None:
        """Values of which every value of the schema is one."""
        if not isinstance(schema, dict) or not depth:
            return None
        if "const" in schema or "enum" in schema:
            return [schema["const"]] if "const" in schema else list(schema["enum"])
        for keyword in ("oneOf", "anyOf"):
            if keyword in schema:
                parts = [self._listed(one, depth - 1) for one in schema[keyword] if one is not False]
                if all(part is not None for part in parts):
                    return [value for part in parts for value in part or ()]
        inner = [
            *schema.get("allOf", ()),
            *([target(self._document, schema["$ref"])] if "$ref" in schema else []),
        ]
        return next((values for one in inner if (values := self._listed(one, depth - 1)) is not None), None)
