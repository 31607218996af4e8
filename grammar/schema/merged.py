"""Merges what a schema says in several places (`allOf`, a reference with other keywords next to it) into one
schema each, also where references lead back.

A merged schema becomes a definition, which is found again when the same places meet again. So a recursive
schema with conditions next to its references has a finite form, and one that is too large to be inlined need
not be.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema_rs

from personae.grammar.regex.plain import NOTHING
from personae.grammar.schema.document import Schema, for_library
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.patterns import language
from personae.grammar.schema.shared import refers_to_definitions
from personae.grammar.schema.walk import rebuild, subschemas, target

_MOST = 2_000
_MOST_SPREAD = 500
_MOST_JUDGED = 5_000  # schemas by which listed values are judged
_LONGEST = 4_000  # of a pattern for several, in characters
_HOMES = ("$defs", "definitions")
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_GREATEST = frozenset(
    {"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum", "minContains"}
)
_LEAST = frozenset({"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum", "maxContains"})
_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties"})
_HOLDING = _OF_OBJECTS | {"items", "prefixItems"}
_OF_STRINGS = frozenset({"allOf", "minLength", "maxLength", "pattern"})
_COUNTING = frozenset({"minProperties", "maxProperties", "uniqueItems", "dependentRequired", "contains"})
_FRACTIONAL = {"multipleOf": 1}

Parts = tuple[dict[str, Any], ...]


class Unmerged(ValueError):
    """No merged form is known."""


def merged(document: Schema, *, spread: bool = False) -> Schema | None:
    """A schema of draft 2020-12 without `allOf` and without keywords next to references, except for patterns
    of strings. It is equal, unless an array must contain several items. None if there is nothing to merge;
    with `spread`, keywords next to `anyOf` are merged with its branches. Raises Unmerged."""
    if isinstance(document, bool):
        return None
    nodes = [one for one, _ in subschemas(document)]
    if not any(
        "allOf" in one
        or ("$ref" in one and _said(one) != {"$ref"})
        or (spread and "anyOf" in one and _said(one) != {"anyOf"})
        for one in nodes
    ):
        return None
    if any(isinstance(one.get("items"), list) or "dependencies" in one for one in nodes):
        raise Unmerged("it is of an older draft")
    if not refers_to_definitions(document):
        raise Unmerged("a reference leads to what is rewritten")
    return _Merger(document, spread=spread).whole()


def _said(schema: dict[str, Any]) -> frozenset[str]:
    return frozenset(schema) & ASSERTIONS


class _Merger:
    def __init__(self, document: dict[str, Any], *, spread: bool) -> None:
        self._document = document
        self._spread = spread
        self._judged = 0
        self._homes = {home: document[home] for home in _HOMES if home in document}
        self._names: dict[frozenset[int], str] = {}
        self._unwritten: list[tuple[str, Parts]] = []
        self._rests: dict[tuple[int, frozenset[str]], dict[str, Any]] = {}
        self._kept: list[Any] = []  # schemas made here, kept so that their identities are not reused

    def whole(self) -> Schema:
        """The document in merged form."""
        root = self._reference([self._document])
        definitions: dict[str, Any] = {}
        while self._unwritten:
            name, parts = self._unwritten.pop()
            definitions[name] = self._merge(parts)
            if len(self._names) > (_MOST_SPREAD if self._spread else _MOST):
                raise Unmerged("there are too many")
        if isinstance(root, bool):
            return root
        around = {"$schema": self._document["$schema"]} if "$schema" in self._document else {}
        return _without_false({**around, **root}, definitions)

    def _reference(self, schemas: Iterable[Any]) -> Any:
        """A reference to the definition for what satisfies all of `schemas`."""
        parts = self._parts(schemas)
        if parts is None:
            return False
        if not parts:
            return True
        key = frozenset(map(id, parts))
        if key not in self._names:
            self._names[key] = f"merged-{len(self._names)}"
            self._unwritten.append((self._names[key], parts))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _parts(self, schemas: Iterable[Any]) -> Parts | None:
        """What the schemas say, where it is said. None if nothing satisfies them."""
        found: dict[int, dict[str, Any]] = {}
        seen: set[int] = set()
        unseen = list(schemas)
        while unseen:
            one = unseen.pop(0)
            if one is False:
                return None
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            self._kept.append(one)
            unseen = [*one.get("allOf", ()), *unseen]
            if "$ref" in one:
                reference = str(one["$ref"])
                if not (reference == "#" or reference.startswith("#/")):
                    raise Unmerged("a reference leads elsewhere")
                unseen.append(target(self._document, reference))
            if _said(one) - {"allOf", "$ref"}:
                own = self._without(one, frozenset({"allOf", "$ref"}))
                found[id(own)] = own
        return tuple(found.values())

    def _without(self, schema: dict[str, Any], keywords: frozenset[str]) -> dict[str, Any]:
        """The schema without some keywords; the same object each time."""
        if not keywords & schema.keys():
            return schema
        key = id(schema), keywords
        if key not in self._rests:
            self._rests[key] = {name: value for name, value in schema.items() if name not in keywords}
        return self._rests[key]

    def _merge(self, parts: Parts) -> Any:
        """One schema for what satisfies all parts."""
        listing = next((one for one in parts if "enum" in one or "const" in one), None)
        if listing is not None:
            return self._listed(listing, parts)
        for one in parts:
            if "anyOf" in one:
                return self._either(one, parts)
        parts = (*self._with_names_as_patterns(parts),)
        if sum("contains" in one for one in parts) > 1:
            parts = (*_containing_in_turn(parts),)
        found: dict[str, Any] = {}
        kinds = _TYPES | {"integer"}
        for one in parts:
            if "type" in one:
                kinds &= _kinds(one["type"])
        if not kinds:
            return False
        if any("type" in one for one in parts):
            shown = kinds - {"integer"} if "number" in kinds else kinds
            found["type"] = sorted(shown) if len(shown) > 1 else next(iter(shown))
        for one in parts:
            for keyword in sorted(_said(one) - {"type", "allOf", "$ref"} - _HOLDING):
                self._add(found, keyword, one[keyword])
        if any(_OF_OBJECTS & one.keys() for one in parts):
            self._add_members(found, parts)
        self._add_items(found, [one for one in parts if {"items", "prefixItems"} & one.keys()])
        if found.get("not") == _FRACTIONAL and "number" not in kinds:
            kinds -= {"integer"}
            if not kinds:
                return False
            found = {**found, "type": sorted(kinds)}
        if kinds == {"string"} and len(found.get("allOf", ())) > 1:
            found = _in_one_pattern(found)
            if found.get("pattern") == NOTHING:
                return False
        if "type" not in found and _COUNTING & found.keys():
            found["type"] = sorted(_TYPES)
        if "allOf" in found and kinds != {"string"}:
            return _by_kind(found, kinds)
        if "object" not in kinds:
            found = {key: value for key, value in found.items() if key not in _OBJECT_KEYWORDS}
        if any(found.get("properties", {}).get(name) is False for name in found.get("required", ())):
            others = sorted(kinds - {"object"})
            return {**found, "type": others} if others else False
        return found

    def _with_names_as_patterns(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """The parts, with a pattern and no other names in place of `propertyNames`."""
        for one in parts:
            if "propertyNames" not in one:
                yield one
                continue
            yield {keyword: value for keyword, value in one.items() if keyword != "propertyNames"}
            names = self._parts([one["propertyNames"]])
            pattern = NOTHING if names is None else language({"allOf": list(names)})
            if pattern is None:
                raise Unmerged("the names of properties are not known")
            yield {"patternProperties": {pattern: True}, "additionalProperties": False}

    def _listed(self, listing: dict[str, Any], parts: Parts) -> Any:
        values = [listing["const"]] if "const" in listing else listing["enum"]
        refers = any("$ref" in node for part in parts for node, _ in subschemas(part))
        here = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **(self._homes if refers else {}),
            "allOf": list(parts),
        }
        self._judged += sum(1 for _ in subschemas(here))
        if self._judged > _MOST_JUDGED:
            raise Unmerged("too many lists of values have more beside them")
        try:
            judge = jsonschema_rs.Draft202012Validator(for_library(here), offline=True, validate_formats=True)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise Unmerged("a part cannot be judged alone") from error
        left = [value for value in values if judge.is_valid(value)]
        return {"enum": left} if left else False

    def _either(self, one: dict[str, Any], parts: Parts) -> Any:
        """The alternatives of one part, each with all the other parts."""
        rest = self._without(one, frozenset({"anyOf"}))
        others = [rest if part is one else part for part in parts]
        ways = [self._reference([branch, *others]) for branch in one["anyOf"]]
        left = [way for way in ways if way is not False]
        return {"anyOf": left} if left else False

    def _add(self, found: dict[str, Any], keyword: str, value: Any) -> None:
        if keyword in ("pattern", "format"):
            found["allOf"] = [*found.get("allOf", ()), {keyword: value}]
        elif keyword in _GREATEST:
            found[keyword] = max(found.get(keyword, value), value)
        elif keyword in _LEAST:
            found[keyword] = min(found.get(keyword, value), value)
        elif keyword == "required":
            found[keyword] = [*dict.fromkeys([*found.get(keyword, ()), *value])]
        elif keyword == "uniqueItems":
            found[keyword] = found.get(keyword, False) or value
        elif keyword == "dependentRequired":
            known = found.setdefault(keyword, {})
            for name, others in value.items():
                known[name] = [*dict.fromkeys([*known.get(name, ()), *others])]
        elif keyword == "multipleOf" and isinstance(value, int):
            found[keyword] = math.lcm(found.get(keyword, 1), value)
        elif keyword == "not" and value == _FRACTIONAL:
            found[keyword] = value
        elif keyword == "contains" and keyword not in found:
            found[keyword] = self._reference([value])
        else:
            raise Unmerged(f"{keyword} is not merged")

    def _add_items(self, found: dict[str, Any], said: list[dict[str, Any]]) -> None:
        """What the parts say of items, up to the last place that one of them names, and from there on."""
        places = max((len(one.get("prefixItems", ())) for one in said), default=0)
        if places:
            found["prefixItems"] = [
                self._reference(
                    (*one.get("prefixItems", ()), *[one.get("items", True)] * places)[place] for one in said
                )
                for place in range(places)
            ]
        if any("items" in one for one in said):
            found["items"] = self._reference(one.get("items", True) for one in said)

    def _add_members(self, found: dict[str, Any], parts: Parts) -> None:
        """What the parts say of properties."""
        said = [one for one in parts if _OF_OBJECTS & one.keys()]
        closed = [
            one
            for one in said
            if one.get("additionalProperties") is False and not one.get("patternProperties")
        ]
        listed = dict.fromkeys(name for one in said for name in one.get("properties", ()))
        listed |= dict.fromkeys(found.get("required", ()))
        names = [name for name in listed if all(name in one.get("properties", {}) for one in closed)]
        patterned = [one for one in said if one.get("patternProperties")]
        if closed:
            barred = [name for name in found.get("required", ()) if name not in names]
            found["properties"] = {name: self._member(name, said) for name in names}
            found["properties"] |= dict.fromkeys(barred, False)
            found["additionalProperties"] = False
            return
        if names:
            found["properties"] = {name: self._member(name, said) for name in names}
        others = [one["additionalProperties"] for one in said if "additionalProperties" in one]
        if patterned:
            unpatterned = [one.get("additionalProperties", True) for one in said if one not in patterned]
            values = [value for one in patterned for value in one["patternProperties"].values()]
            if len(patterned) == 1 and all(one is True for one in unpatterned):
                found["patternProperties"] = {
                    pattern: self._reference([value])
                    for pattern, value in patterned[0]["patternProperties"].items()
                }
            else:
                pattern = _in_common(patterned)
                found["patternProperties"] = {pattern: self._reference([*values, *unpatterned])}
        if others:
            found["additionalProperties"] = self._reference(others)

    def _member(self, name: str, said: list[dict[str, Any]]) -> Any:
        """What the value of a property must satisfy."""
        schemas: list[Any] = []
        for one in said:
            here = [one["properties"][name]] if name in one.get("properties", {}) else []
            for pattern, value in one.get("patternProperties", {}).items():
                if jsonschema_rs.is_valid(for_library({"pattern": pattern}), name):
                    here.append(value)
            schemas += here or [one.get("additionalProperties", True)]
        return self._reference(schemas)


def _containing_in_turn(parts: Parts) -> Iterator[dict[str, Any]]:
    """The parts, with the items that each must contain at the beginning, in turn. That accepts less: they
    might be anywhere."""
    place = 0
    for one in parts:
        if "contains" not in one:
            yield one
            continue
        if "maxContains" in one or one.get("minContains", 1) != 1:
            raise Unmerged("several items are counted")
        yield {keyword: value for keyword, value in one.items() if not keyword.endswith("ontains")}
        yield {"prefixItems": [*[True] * place, one["contains"]], "minItems": place + 1}
        place += 1


def _by_kind(schema: dict[str, Any], kinds: frozenset[str]) -> dict[str, Any]:
    """A schema whose strings have several patterns: one for strings, one for all other types."""
    others = sorted(kinds - {"string"} - ({"integer"} if "number" in kinds else set()))
    of_strings = {keyword: value for keyword, value in schema.items() if keyword in _OF_STRINGS}
    rest = {keyword: value for keyword, value in schema.items() if keyword not in _OF_STRINGS}
    return {"anyOf": [{**of_strings, "type": "string"}, {**rest, "type": others}]}


def _in_one_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Strings with one pattern instead of several, if one is known that is not long. A format stays, because
    its pattern matches fewer strings."""
    formatted = any("format" in one for one in schema["allOf"])
    pattern = language({"allOf": schema["allOf"]}, wide=formatted)
    if pattern is None or len(pattern) > _LONGEST or (formatted and pattern != NOTHING):
        return schema
    return {key: value for key, value in schema.items() if key != "allOf"} | {"pattern": pattern}


def _in_common(patterned: list[dict[str, Any]]) -> str:
    """The pattern of the names that match one pattern of each part. No name matches only some of them.
    Raises Unmerged if that is not so."""
    patterns = dict.fromkeys(str(pattern) for one in patterned for pattern in one["patternProperties"])
    if any(len(one["patternProperties"]) > 1 for one in patterned):
        raise Unmerged("several patterns of names are not merged")
    if len(patterns) == 1:
        return next(iter(patterns))
    found = None
    if all(one.get("additionalProperties") is False for one in patterned):
        found = language({"allOf": [{"pattern": pattern} for pattern in patterns]})
    if found is None:
        raise Unmerged("patterns of names are not merged")
    return found


def _without_false(root: dict[str, Any], definitions: dict[str, Any]) -> Schema:
    """The schema without references to definitions that nothing satisfies."""
    barred: set[str] = set()

    def kept(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        if str(schema.get("$ref", "")).removeprefix("#/$defs/") in barred:
            return False
        found = rebuild(schema, lambda _, child: kept(child))
        if "anyOf" in found:
            found["anyOf"] = [one for one in found["anyOf"] if one is not False]
            if not found["anyOf"]:
                return False
        listed = found.get("properties", {})
        if found.get("type") == "object" and any(
            listed.get(one) is False for one in found.get("required", ())
        ):
            return False
        if found.get("type") == "array" and found.get("minItems", 0) > 0:
            first = [*found.get("prefixItems", ()), *[found.get("items", True)]][: found["minItems"]]
            if False in [one for one in first if isinstance(one, bool)]:
                return False
        if found.get("contains") is False and found.get("minContains", 1) > 0:
            if found.get("type") == "array":
                return False
            raise Unmerged("an array cannot contain what it must")
        return found

    while True:
        definitions = {name: kept(one) for name, one in definitions.items()}
        more = {name for name, one in definitions.items() if one is False} - barred
        if not more:
            break
        barred |= more
    whole = kept(root)
    if isinstance(whole, bool):
        return whole
    return {**whole, "$defs": {name: one for name, one in definitions.items() if one is not False}}


_OBJECT_KEYWORDS = _OF_OBJECTS | {"required", "minProperties", "maxProperties", "dependentRequired"}


def _kinds(kind: Any) -> frozenset[str]:
    kinds = frozenset(kind if isinstance(kind, list) else [kind])
    return kinds | {"integer"} if "number" in kinds else kinds
