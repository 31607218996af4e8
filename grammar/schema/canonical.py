"""Rewrites a schema into an equal one that a grammar can enforce.

The set algebra is jsonschema-rs's canonical form: references inlined, allOf merged, schemas without a type
split by type, if/then/else, dependent schemas and oneOf turned into disjoint alternatives, `not`
complemented. Parts that inlining has copied become references again. The canonical form uses a few keywords
that grammars lack, which `_lower` rewrites. It also sorts names, which `_reorder` undoes: the order of
properties is the order in which a model writes them.
"""

import math
from itertools import islice
from typing import Any

import jsonschema_rs

from personae.grammar.schema.document import Schema, dialect, for_library
from personae.grammar.schema.gate import is_exact
from personae.grammar.schema.patterns import any_of_length, anything_but, language
from personae.grammar.schema.shared import shared
from personae.grammar.schema.walk import children, rebuild, subschemas, target

# Drafts in which a reference replaces the whole schema that it is in.
_REF_ALONE = {jsonschema_rs.Draft4, jsonschema_rs.Draft6, jsonschema_rs.Draft7}

# The most schemas after references are inlined. No public schema with more was enforceable in the end, after
# seconds; the largest that was had 1,905.
_MOST_INLINED = 4096

# The most schemas in a canonical form: alternatives are multiplied. None of a public schema with more was of
# use; the largest that was had 9,763.
_MOST_CANONICAL = 20_000


class TooLarge(ValueError):
    """The canonical form of a schema would be too large to be of use."""


def canonicalise(document: Schema) -> Schema:
    """An equal schema, as far as possible without the keywords that grammars cannot follow.

    What could not be rewritten stays, and the gate finds it. Raises TooLarge, and ValueError (jsonschema-rs's
    errors among them) if there is no canonical form.
    """
    if isinstance(document, bool):
        return document
    keywords = {keyword for one, _ in subschemas(document) for keyword in one}
    if keywords & {"$dynamicRef", "$recursiveRef"}:
        raise ValueError("a dynamic reference has no canonical form")
    if _inlined(document) > _MOST_INLINED:
        raise TooLarge("references inlined, the schema would be too large")
    draft = dialect(document)
    inlined: Schema = document
    if not keywords & {"unevaluatedProperties", "unevaluatedItems"}:  # inlined, they see their siblings
        separated = document if draft in _REF_ALONE else _referred_alone(document)
        inlined = jsonschema_rs.dereference(separated, draft=draft, offline=True)
    canonical = jsonschema_rs.canonicalize(inlined, draft=draft, validate_formats=True, offline=True)
    written = canonical.to_json_schema()
    if next(islice(subschemas(written), _MOST_CANONICAL, None), None) is not None:
        raise TooLarge("the canonical form is too large")
    lowered = _lower(shared(written))
    return lowered if isinstance(lowered, bool) else _reorder(lowered, _name_order(document, {}))


def _inlined(document: dict[str, Any]) -> int:
    """How many schemas there are once references are inlined, except for those that lead back to
    themselves."""
    counts: dict[int, int] = {}

    def count(schema: Any) -> int:
        if not isinstance(schema, dict):
            return 1
        if id(schema) not in counts:
            counts[id(schema)] = 0
            counts[id(schema)] = 1 + sum(
                count(child) for step, child in children(schema) if step[0] not in ("$defs", "definitions")
            )
            if "$ref" in schema:
                counts[id(schema)] += count(target(document, schema["$ref"]))
        return counts[id(schema)]

    return count(document)


def _referred_alone(schema: Any) -> Any:
    """Each reference becomes one branch of allOf, because inlining lets its keywords replace its siblings."""
    if not isinstance(schema, dict):
        return schema
    apart = rebuild(schema, lambda _, child: _referred_alone(child))
    if "$ref" in apart and len(apart) > 1:
        apart["allOf"] = [*apart.get("allOf", ()), {"$ref": apart.pop("$ref")}]
    return apart


def _lower(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") == {}:
        return False
    lowered = rebuild(schema, lambda _, child: _lower(child))
    if "propertyNames" in lowered:
        lowered = _lower_property_names(lowered)
    if lowered.get("type") == "string":
        lowered = _lower_string(lowered)
    if lowered.get("type") in ("integer", "number"):
        lowered = _lower_bounds(lowered)
    return _lower_property_count(lowered)


def _lower_property_names(schema: dict[str, Any]) -> dict[str, Any]:
    """propertyNames becomes listed properties and patterns; no other name is allowed."""
    names, patterns = [], []
    allowed = schema["propertyNames"]
    for one in allowed.get("anyOf", [allowed]) if isinstance(allowed, dict) else []:
        if "enum" in one or "const" in one:
            names += one.get("enum", [one.get("const")])
        elif set(one) <= {"type", "minLength", "maxLength"}:
            patterns.append(any_of_length(one.get("minLength", 0), one.get("maxLength")))
        elif set(one) == {"type", "pattern"}:
            patterns.append(one["pattern"])
        elif (pattern := language(one)) is not None:
            patterns.append(pattern)
        else:
            return schema
    if not set(schema.get("patternProperties", ())) <= set(patterns):
        return schema if patterns or not _are_listed(schema, names) else _only(schema, names, {})
    others = schema.get("additionalProperties", True)
    by_pattern = {pattern: schema.get("patternProperties", {}).get(pattern, others) for pattern in patterns}
    return _only(schema, names, by_pattern)


def _are_listed(schema: dict[str, Any], names: list[str]) -> bool:
    """Whether each name has its own schema, into which the canonical form has merged those of its
    patterns."""
    return set(names) <= set(schema.get("properties", {}))


def _only(schema: dict[str, Any], names: list[str], by_pattern: dict[str, Any]) -> dict[str, Any]:
    listed = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    # A name without a schema of its own that a pattern matches is left to the pattern.
    matched = jsonschema_rs.validator_for(
        for_library({"anyOf": [{"pattern": pattern} for pattern in by_pattern] or [False]})
    )
    properties = {
        name: listed.get(name, others) for name in names if name in listed or not matched.is_valid(name)
    }
    properties |= {
        name: value for name, value in listed.items() if name not in names and matched.is_valid(name)
    }
    only = {key: value for key, value in schema.items() if key not in ("propertyNames", "patternProperties")}
    only |= {"properties": properties, "additionalProperties": False}
    return only | ({"patternProperties": by_pattern} if by_pattern else {})


def _lower_string(schema: dict[str, Any]) -> dict[str, Any]:
    """Strings that exclude a list of values or a pattern become strings that match the complement."""
    conditions = [{"not": schema["not"]}] if "not" in schema else []
    conditions += schema.get("allOf", [])
    rewritten = []
    for condition in conditions:
        barred = condition.get("not", {})
        pattern = None
        if set(barred) == {"enum"} or set(barred) == {"const"}:
            pattern = anything_but(barred.get("enum", [barred.get("const")]))
        elif "not" in condition:
            pattern = language({"not": barred})
        rewritten.append(condition if pattern is None else {"type": "string", "pattern": pattern})
    rest = {key: value for key, value in schema.items() if key not in ("not", "allOf")}
    return rest | ({"allOf": rewritten} if rewritten else {})


def _lower_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds that no double can represent, moved inwards to the next double."""
    moved = dict(schema)
    for keywords, towards in (
        (("maximum", "exclusiveMaximum"), -math.inf),
        (("minimum", "exclusiveMinimum"), math.inf),
    ):
        for keyword in keywords:
            value = schema.get(keyword)
            if isinstance(value, int) and not is_exact(value) and abs(value) < 2**1000:
                bound = float(value)
                beyond = bound > value if towards < 0 else bound < value
                moved[keyword] = int(math.nextafter(bound, towards) if beyond else bound)
    return moved


def _lower_property_count(schema: dict[str, Any]) -> dict[str, Any]:
    """One more property at least becomes alternatives if some are listed and optional: this one, that one,
    or another."""
    required = schema.get("required", [])
    optional = [name for name in schema.get("properties", {}) if name not in required]
    if schema.get("minProperties") != len(required) + 1 or not optional or "maxProperties" in schema:
        return schema
    around = {key: value for key, value in schema.items() if key.startswith("$") or key == "definitions"}
    here = {key: value for key, value in schema.items() if key not in around}
    without = here | {"properties": here["properties"] | dict.fromkeys(optional, False)}
    del here["minProperties"]
    return around | {"anyOf": [*(here | {"required": [*required, name]} for name in optional), without]}


def _name_order(schema: Any, ranks: dict[str, int]) -> dict[str, int]:
    """The names of all properties in the order in which the document first mentions them."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            ranks.setdefault(name, len(ranks))
        for value in schema.values():
            _name_order(value, ranks)
    elif isinstance(schema, list):
        for value in schema:
            _name_order(value, ranks)
    return ranks


def _reorder(schema: Any, ranks: dict[str, int]) -> Any:
    if not isinstance(schema, dict):
        return schema
    ordered = rebuild(schema, lambda _, child: _reorder(child, ranks))
    if "properties" in ordered:
        names = sorted(ordered["properties"], key=lambda name: ranks.get(name, len(ranks)))
        ordered["properties"] = {name: ordered["properties"][name] for name in names}
    return ordered
