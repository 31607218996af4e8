"""Hypothesis strategies for JSON values and JSON Schemas (2020-12) that are small enough to collide."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "ab"])
TEXTS = st.sampled_from(["", "a", "b", "ab", "ba", "aab", "é"])
NUMBERS = st.one_of(st.integers(-3, 6), st.sampled_from([0.5, 1.5, -2.5, 3.5]))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]*$", "[^a]", "^.{2}$"])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
SMALL = st.integers(0, 3)


def _keywords(inner: st.SearchStrategy[Any], references: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    some = st.lists(inner, min_size=1, max_size=3)
    optional = {
        "type": st.one_of(TYPES, st.lists(TYPES, min_size=1, max_size=3, unique=True)),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "minimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": st.integers(1, 3),
        "minLength": SMALL,
        "maxLength": SMALL,
        "pattern": PATTERNS,
        "items": inner,
        "prefixItems": some,
        "minItems": SMALL,
        "maxItems": SMALL,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1),
        "additionalProperties": inner,
        "propertyNames": inner,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "minProperties": SMALL,
        "maxProperties": SMALL,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "anyOf": some,
        "allOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
    }
    if references:
        optional["$ref"] = st.just("#/$defs/other")
    return st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({keyword: optional[keyword] for keyword in chosen})
    )


INNER = st.recursive(st.one_of(st.booleans(), _keywords(st.booleans())), _keywords, max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """A schema whose references, if any, point to its one definition."""
    return {**draw(_keywords(INNER)), "$defs": {"other": draw(_keywords(st.booleans(), references=False))}}
