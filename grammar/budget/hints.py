"""What an answer may have to write by a schema: the strings in it, which the search tries."""

import json
import math
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any

from personae.grammar.budget.regexes import pattern_distances
from personae.grammar.schema.shortest import shortest_alone
from personae.grammar.schema.walk import HITS, children

_MOST_HINTS = 50_000  # bytes
_MOST_VALUES = 8
_DEPTH = 6


def hints_of(schema: Any) -> list[bytes]:
    """Required names and listed values, those of short alternatives first."""
    found: dict[bytes, float] = {}

    def visit(node: Any, weight: float) -> None:
        if not isinstance(node, dict):
            return
        values = [node["const"]] if "const" in node else node.get("enum", ())
        for text in (*node.get("required", ()), *values):
            if isinstance(text, str):
                written = _text(text)
                found[written] = min(found.get(written, math.inf), weight + len(written))
        for example in examples_of(node):
            written = _text(example)
            found.setdefault(written, weight + len(written))
        for keyword in ("anyOf", "oneOf"):
            for one in node.get(keyword, ()):
                visit(one, min(shortest_alone(one) or 0.0, 1e6))
        for step, child in children(node):
            if step[0] not in ("anyOf", "oneOf"):
                visit(child, weight)

    visit(schema, 0.0)
    ordered = sorted(found, key=lambda text: (found[text], text))
    total = 0
    kept = []
    for text in ordered:
        total += len(text)
        if total > _MOST_HINTS:
            break
        kept.append(text)
    return kept


def counted_values(nodes: Iterable[dict[str, Any]], *, any_order: bool) -> tuple[bytes, ...]:
    """What objects and arrays may have to contain, as JSON: the names, with a colon, of properties that are
    counted or, in any order, required; and a value for each schema whose items are counted."""
    nodes = list(nodes)
    names: dict[str, None] = {}
    for node in nodes:
        wanted = node.get("required", ())
        names |= dict.fromkeys(wanted if any_order else ())
        if node.get("minProperties", 0) > len(wanted):
            names |= dict.fromkeys(node.get("properties", ()))
        if "dependentRequired" in node:
            names |= dict.fromkeys(name for many in node["dependentRequired"].values() for name in many)
    found = [value for node in nodes if HITS in node for value in _values(node[HITS], _DEPTH)]
    texts = (json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in found)
    keys = (json.dumps(name, ensure_ascii=False) + ":" for name in names)
    return tuple(dict.fromkeys(text.encode("utf-8", "surrogatepass") for text in (*keys, *texts)))


def _values(schema: Any, depth: int) -> list[Any]:
    """Short values for a schema, as far as they are easy to see. The grammar decides whether they are
    valid."""
    if not isinstance(schema, dict) or not depth:
        return [0]
    if "const" in schema or "enum" in schema:
        return [schema["const"]] if "const" in schema else schema["enum"][:_MOST_VALUES]
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if parts:
        return [value for one in parts for value in _values(one, depth - 1)][:_MOST_VALUES]
    kinds = schema.get("type", "integer")
    return [_value(kind, schema, depth) for kind in (kinds if isinstance(kinds, list) else [kinds])]


def _value(kind: str, schema: dict[str, Any], depth: int) -> Any:
    if kind == "object":
        listed = schema.get("properties", {})
        wanted = schema.get("required", ())
        names = [
            *(name for name in listed if name in wanted),
            *(name for name in wanted if name not in listed),
        ]
        return {name: _values(listed.get(name, True), depth - 1)[0] for name in names}
    if kind == "array":
        return [_values(schema.get("items", True), depth - 1)[0]] * schema.get("minItems", 0)
    if kind == "string":
        return next(iter(examples_of(schema)), "x" * schema.get("minLength", 0))
    if kind in ("integer", "number"):
        step, low = schema.get("multipleOf", 1), schema.get("minimum", schema.get("exclusiveMinimum", 0))
        number = max(low, 0) if "maximum" not in schema else min(max(low, 0), schema["maximum"])
        number = math.ceil(number / step) * step
        return number + step if number == schema.get("exclusiveMinimum") else number
    return None if kind == "null" else True


def examples_of(node: dict[str, Any]) -> list[str]:
    """Texts that match a schema's pattern, and one that may match all patterns that it has to match
    together."""
    patterns = [
        str(one["pattern"])
        for one in (node, *node.get("allOf", ()))
        if isinstance(one, dict) and "pattern" in one
    ]
    examples = [pattern_distances(pattern).example for pattern in patterns]
    together = ["".join(examples)] if len(examples) > 1 else []  # no pattern is about the whole text
    return [*together, *(examples[:1] if "pattern" in node else ())]


def _text(text: str) -> bytes:
    """The string as it appears between quotes, including the closing one."""
    return encode_basestring(text).encode("utf-8", "surrogatepass")[1:]
