"""What an answer by a schema may have to write: the strings in it, for the search to try."""

import math
from json.encoder import encode_basestring
from typing import Any

from personae.grammar.budget.regexes import pattern_distances
from personae.grammar.schema.shortest import shortest_alone
from personae.grammar.schema.walk import children

_MOST_HINTS = 50_000  # bytes


def hints_of(schema: Any) -> list[bytes]:
    """Names that are required and values that are listed, those of short alternatives first."""
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


def examples_of(node: dict[str, Any]) -> list[str]:
    """Texts that match a schema's pattern, and one that may match all of those it has to match together."""
    patterns = [
        str(one["pattern"])
        for one in (node, *node.get("allOf", ()))
        if isinstance(one, dict) and "pattern" in one
    ]
    examples = [pattern_distances(pattern).example for pattern in patterns]
    together = ["".join(examples)] if len(examples) > 1 else []  # no pattern is about the whole text
    return [*together, *(examples[:1] if "pattern" in node else ())]


def _text(text: str) -> bytes:
    """The string as it stands between quotes, the closing one included."""
    return encode_basestring(text).encode("utf-8", "surrogatepass")[1:]
