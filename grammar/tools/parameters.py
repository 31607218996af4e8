"""Splits a function's schema into parameters, for formats that write each argument separately."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema_rs

from personae.errors import GrammarError, as_json
from personae.grammar.schema.document import pointer
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.walk import subschemas, target
from personae.grammar.tools.function import Function

_DEFINITIONS = ("$defs", "definitions")
_UNDERSTOOD = frozenset({"type", "properties", "required", "additionalProperties"})
_MOST_BRANCHES = 256
_LOCAL = tuple(f"#/{name}/" for name in _DEFINITIONS)


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """A parameter and its schema, together with the definitions that the schema refers to."""

    name: str
    schema: dict[str, Any]
    required: bool


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters in the order in which they are written. `others` is the schema of any number of
    parameters with other names; None if there may be none."""

    listed: tuple[ToolParameter, ...]
    others: dict[str, Any] | None = None


def parameters_of(function: Function) -> Parameters:
    """The parameters of a function. If the schema lists parameters, only those can be written.

    Raises GrammarError if a strict function's schema restricts more than each parameter by itself.
    """
    schema = _without_references(function.parameters)
    for keyword in schema if function.strict else ():
        if keyword in ASSERTIONS and keyword not in _UNDERSTOOD:
            raise _refusal(function, f"the keyword {keyword!r} at {pointer((keyword,))}")
    definitions = {name: schema[name] for name in (*_DEFINITIONS, "$schema") if name in schema}
    others = schema.get("additionalProperties", True)
    properties = dict(schema.get("properties") or {})
    for name in schema.get("required") or ():
        if name not in properties:
            if others is False:
                raise GrammarError(f"The required {name!r} is not allowed.", param=function.param)
            properties[name] = others
    required = set(schema.get("required") or ())
    listed = [
        ToolParameter(name, _alone(one, definitions, function), name in required)
        for name, one in properties.items()
        if one is not False
    ]
    if listed or others is False:
        return Parameters(tuple(listed))
    return Parameters((), _alone(others, definitions, function))


def _without_references(schema: dict[str, Any]) -> dict[str, Any]:
    """The object schema that `schema` refers to, if it says nothing else: as pydantic writes a recursive
    model."""
    definitions = {name: schema[name] for name in (*_DEFINITIONS, "$schema") if name in schema}
    found, seen = schema, set[str]()
    while True:
        said = {keyword: value for keyword, value in found.items() if keyword in ASSERTIONS}
        if said.get("type") == "object":  # as arguments are anyway
            del said["type"]
        match said:
            case {"allOf": list(parts), **rest} if not rest:
                others = [part for part in parts if part != {"type": "object"}]
                following = others[0] if len(others) == 1 else None
            case {"$ref": str(reference), **rest} if not rest and reference not in seen:
                seen.add(reference)
                following = target(schema, reference)
            case _:
                return found
        if not isinstance(following, dict):
            return found
        found = following | definitions  # of the whole, as references mean them


def _alone(schema: Any, definitions: dict[str, Any], function: Function) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    for one, path in subschemas(schema):
        if "$ref" in one and not str(one["$ref"]).startswith(_LOCAL):
            if function.strict:
                raise _refusal(
                    function, f"the reference {as_json(one['$ref'])} at {pointer((*path, '$ref'))}"
                )
            return {}
    return {**schema, **_needed(schema, definitions)}


def _needed(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions that a schema refers to, directly or through another."""
    kept: dict[str, Any] = {name: {} for name, held in definitions.items() if isinstance(held, dict)}
    unseen = [schema]
    while unseen:
        for one, _ in subschemas(unseen.pop()):
            _, container, name, *_ = (*str(one.get("$ref", "")).split("/"), "", "")
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if container in kept and name in definitions[container] and name not in kept[container]:
                kept[container][name] = definitions[container][name]
                unseen.append(definitions[container][name])
    return {name: kept.get(name, value) for name, value in definitions.items() if kept.get(name, value)}


def _refusal(function: Function, what: str) -> GrammarError:
    return GrammarError(
        f"{function.name}: {what} cannot be enforced where a model writes arguments one by one, as this one "
        "does. Remove it, or set strict to false.",
        param=function.param,
    )


def branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Schemas that together allow what `schema` allows: the members of its unions if these are simple and not
    too many, else the schema itself."""
    definitions = {name: schema[name] for name in (*_DEFINITIONS, "$schema") if name in schema}
    found = list(islice(_branches(schema, schema, frozenset()), _MOST_BRANCHES + 1))
    if len(found) > _MOST_BRANCHES:
        return [schema]
    return [branch | definitions for place, branch in enumerate(found) if branch not in found[:place]]


def _branches(schema: Any, root: dict[str, Any], seen: frozenset[str]) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict):
        yield {} if schema is True else {"not": {}}
        return
    says = schema.keys() & ASSERTIONS
    if says == {"$ref"} and schema["$ref"] not in seen:
        yield from _branches(target(root, schema["$ref"]), root, seen | {schema["$ref"]})
    elif says == {"anyOf"}:
        for one in schema["anyOf"]:
            yield from _branches(one, root, seen)
    elif says == {"type"} and isinstance(schema["type"], list):
        for kind in schema["type"]:
            yield {"type": kind}
    elif says in ({"enum"}, {"const"}, {"enum", "type"}, {"const", "type"}):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "type" in schema:
            allowed = jsonschema_rs.validator_for({"type": schema["type"]})
            values = [value for value in values if allowed.is_valid(value)]
        for kind in (str, type(None)):
            if members := [value for value in values if type(value) is kind]:
                yield {"enum": members}
        if others := [value for value in values if type(value) not in (str, type(None))]:
            yield {"enum": others}
    else:
        yield {name: value for name, value in schema.items() if name not in _DEFINITIONS}
